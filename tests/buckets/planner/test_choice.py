"""Plans chosen by traffic and within budgets: coverage always holds, and what is spent pays."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.coverage import prove
from llmc.buckets.evaluation.replay import replay
from llmc.buckets.limits import Limits
from llmc.buckets.planner.budget import Budget
from llmc.buckets.planner.planner import PlanInputs, frontier_from, make_plan, plan_from
from llmc.buckets.report.text import plan_text
from llmc.buckets.strategies.base import Range
from llmc.buckets.traffic.source import Traffic
from llmc.errors import InputError
from llmc.settings import Settings
from tests.buckets.generators import PROPERTY, small_limits
from tests.tiers import full

SAMPLE = Path(__file__).parents[2] / "data" / "azure_conv_sample.csv"
LIMITS = Limits(8192, 1)


def trace(folder: Path, rows: Iterable[tuple[float, int, int]]) -> Path:
    path = folder / "trace.csv"
    path.write_text("time,prompt_tokens,output_tokens\n" + "".join(f"{t},{p},{o}\n" for t, p, o in rows))
    return path


def padding(plan, phase="prompt", path=SAMPLE, rate=None):
    return getattr(replay(plan, Traffic(path, rate)), phase).padding


def test_traffic_alone_requests_the_traffic_strategy():
    plan = make_plan(LIMITS, traffic=Traffic(SAMPLE))
    assert plan.provenance.strategy == "traffic"
    assert plan.provenance.origins["strategy"] == "flag --traffic"
    assert len(plan.prompt) == 32
    assert prove(plan.limits, plan.buckets) == []


def test_as_many_graphs_from_traffic_padding_half_of_what_a_rule_does():
    rule = make_plan(LIMITS, "exponential")
    chosen = make_plan(LIMITS, traffic=Traffic(SAMPLE), budget=Budget(max_graphs=len(rule.prompt)))
    assert len(chosen.prompt) <= len(rule.prompt)
    assert padding(chosen) < 0.6 * padding(rule)


def test_the_expected_padding_is_what_replaying_finds():
    plan = make_plan(LIMITS, traffic=Traffic(SAMPLE), budget=Budget(max_graphs=12))
    assert plan.provenance.facts["prompt_padding"] == pytest.approx(padding(plan), abs=1e-6)
    assert plan.provenance.facts["decode_padding"] == pytest.approx(padding(plan, "decode"), abs=1e-6)
    assert plan.provenance.facts["prompt_gap"] == pytest.approx(0, abs=1e-6)


def test_in_one_dimension_no_other_choice_is_better():
    """Six lengths, three graphs, one of which must be the longest: by trying all."""
    lengths = [3, 5, 9, 14, 20, 31]
    best = min(sum(min(v for v in (a, b, 31) if v >= n) for n in lengths) for a in range(1, 31) for b in range(a, 31))
    limits = Limits(32, 1, block_size=1)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = trace(Path(folder), [(i * 100.0, n, 1) for i, n in enumerate(lengths)])
        plan = make_plan(limits, traffic=Traffic(path), budget=Budget(max_graphs=3))
        assert padding(plan, path=path) == pytest.approx(best / sum(lengths) - 1)


def test_more_graphs_never_padding_more():
    frontier = frontier_from(PlanInputs(Limits(8192, 4), traffic=Traffic(SAMPLE)), (1, 2, 4, 8, 16, 32))
    for phase in ("prompt", "decode"):
        costs = [point.chosen[phase].cost for point in frontier]
        assert costs == sorted(costs, reverse=True)
        assert all(point.chosen[phase].gap >= -1e-9 for point in frontier)
    assert [point.graphs for point in frontier] == [1, 2, 4, 8, 16, 32]


def test_equal_arguments_give_equal_plans():
    plans = [make_plan(Limits(8192, 8), traffic=Traffic(SAMPLE), budget=Budget(max_graphs=10)) for _ in range(2)]
    assert plans[0].to_json() == plans[1].to_json()


@PROPERTY
@given(small_limits(), st.integers(1, 9), st.integers(0, 2**32))
def test_a_plan_from_any_traffic_covers_everything(limits, graphs, seed):
    import tempfile

    rng = random.Random(seed)
    rows = []
    for index in range(rng.randint(1, 12)):
        prompt = rng.randint(1, limits.longest_prompt)
        rows.append((index * rng.random(), prompt, rng.randint(1, limits.max_model_len - prompt)))
    with tempfile.TemporaryDirectory() as folder:
        path = trace(Path(folder), rows)
        plan = make_plan(limits, traffic=Traffic(path), budget=Budget(max_graphs=graphs))
        assert prove(plan.limits, plan.buckets) == []
        assert len(plan.prompt) <= graphs
        assert len(plan.decode) <= graphs
        found = replay(plan, Traffic(path))
        assert found.prompt.uncovered == found.decode.uncovered == 0
        assert found.prompt.requests == len(rows)


def test_ranges_say_where_buckets_may_lie():
    plan = make_plan(
        Limits(8192, 8),
        traffic=Traffic(SAMPLE),
        prompt_batch=Range(1, 1, 1),
        prompt_query=Range(256, 256, 8192),
        decode_context=Range(512, 512, 8192),
        budget=Budget(max_graphs=8),
    )
    assert {bucket.batch for bucket in plan.prompt} == {1}
    assert all(bucket.query % 256 == 0 for bucket in plan.prompt)
    assert all(bucket.context % 512 == 0 for bucket in plan.decode)


def test_prompts_above_the_token_limit_are_planned_in_chunks():
    limits = Limits(8192, 4, 1024)
    plan = make_plan(limits, traffic=Traffic(SAMPLE), budget=Budget(max_graphs=16))
    assert prove(plan.limits, plan.buckets) == []
    assert max(bucket.tokens for bucket in plan.prompt) <= 1024
    assert any(bucket.context for bucket in plan.prompt)
    assert replay(plan, Traffic(SAMPLE)).prompt.uncovered == 0


def test_a_rule_within_a_budget_keeps_its_best_buckets():
    whole = make_plan(Limits(8192, 1), "linear")
    kept = make_plan(Limits(8192, 1), "linear", traffic=Traffic(SAMPLE), budget=Budget(max_graphs=10))
    assert len(kept.prompt) == 10
    assert set(kept.prompt) <= set(whole.prompt)
    assert Bucket("prompt", 1, 8192, 0) in kept.prompt
    (note,) = [note for note in kept.provenance.notes if note.phase == "prompt" and note.kind == "dropped"]
    assert note.count == len(whole.prompt) - 10
    assert "have the least padding on the recorded traffic (--max-graphs)" in note.text


def test_a_rule_without_traffic_keeps_what_serves_everything_alike():
    kept = make_plan(Limits(1024, 1), "linear", budget=Budget(max_graphs=4))
    assert [bucket.query for bucket in kept.prompt] == [256, 512, 768, 1024]
    assert "every admissible request, all equally likely" in kept.provenance.notes[0].text


def test_a_rules_batches_run_through_the_buckets_kept(tmp_path):
    path = trace(tmp_path, [(0.0, 100 + i % 7, 20) for i in range(64)])
    plan = make_plan(Limits(512, 8), "exponential", traffic=Traffic(path), budget=Budget(max_graphs=3))
    assert prove(plan.limits, plan.buckets) == []
    assert replay(plan, Traffic(path)).prompt.uncovered == 0


def test_padding_requests_the_fewest_graphs():
    plan = make_plan(LIMITS, traffic=Traffic(SAMPLE), budget=Budget(max_padding=0.2))
    assert padding(plan) <= 0.2
    fewer = make_plan(LIMITS, traffic=Traffic(SAMPLE), budget=Budget(max_graphs=len(plan.prompt) - 1))
    assert padding(fewer) > 0.2


class Costs:
    def compile_seconds(self, buckets):
        return 10.0 * len(buckets)

    def graph_bytes(self, buckets):
        return sum(bucket.tokens for bucket in buckets) << 20


def planned(budget: Budget, limits: Limits = LIMITS):
    return plan_from(PlanInputs(limits, traffic=Traffic(SAMPLE)), budget, Costs(), {})


@full
def test_compile_time_is_spent_to_the_last_graph():
    all_padding = []
    for graphs in (6, 13, 19, 23, 43, 75):
        plan = planned(Budget(max_compile_time=10.0 * graphs))
        assert len(plan.buckets) == graphs
        all_padding.append(padding(plan) + padding(plan, "decode"))
    assert all_padding == sorted(all_padding, reverse=True)


def test_graph_memory_bounds_the_sum_over_buckets():
    budget = 20_000 << 20
    plan = planned(Budget(max_graph_memory=budget))
    assert Costs().graph_bytes(plan.buckets) <= budget


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            Budget(max_padding=0.01, max_graphs=8),
            r"no prompt plan of --max-graphs 8 adds 1.0% padding or less .* the least is",
        ),
        (
            Budget(max_padding=0.1, max_compile_time=30.0),
            r"--max-padding 10.0% needs \d+ prompt and \d+ decode",
        ),
        (Budget(max_compile_time=5.0), r"the smallest plan, 1 graph of each phase, .* about 20 s, above --max-compile"),
        (Budget(max_graph_memory=1 << 20), r"the smallest plan, .* graphs take about 8,19\d MiB, above"),
    ],
)
def test_budgets_that_no_plan_meets_say_what_would(budget, message):
    with pytest.raises(InputError, match=message):
        planned(budget)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_graphs": 0}, "--max-graphs 0 covers nothing: the smallest plan has 1 graph of each phase"),
        ({"max_padding": -0.1}, "--max-padding -0.1 must not be negative"),
        ({"max_padding": float("nan")}, "--max-padding nan must not be negative"),
        ({"max_compile_time": -1.0}, "--max-compile-time -1.0 must not be negative"),
    ],
)
def test_a_budget_that_is_none_is_refused(bounds, message):
    with pytest.raises(InputError, match=message):
        Budget(**bounds)


def test_time_and_memory_need_a_model():
    with pytest.raises(InputError, match="needs a model: give MODEL or --config FILE"):
        make_plan(LIMITS, traffic=Traffic(SAMPLE), budget=Budget(max_compile_time=60.0))


def test_the_traffic_strategy_needs_traffic():
    with pytest.raises(InputError, match="name them with --traffic FILE"):
        make_plan(LIMITS, "traffic")
    with pytest.raises(InputError, match="name it with --from-file FILE"):
        make_plan(LIMITS, "file")


def test_requests_above_the_limits_are_reported(tmp_path):
    path = trace(tmp_path, [(0, 100, 5), (1, 5000, 5), (2, 60, 5000)])
    plan = make_plan(Limits(1024, 1), traffic=Traffic(path))
    (note,) = [note for note in plan.provenance.notes if note.kind == "warning"]
    assert note.text.startswith("1 of 3 requests admitted, left out: 1 with a prompt above 1023 tokens")
    assert plan.provenance.facts["requests_left_out"] == 2
    clipped = make_plan(Limits(1024, 1), traffic=Traffic(path, clip=True))
    assert clipped.provenance.facts["requests"] == 3
    assert clipped.provenance.facts["requests_clipped"] == 2


def test_each_phase_may_have_a_strategy_of_its_own():
    settings = Settings.from_environment(
        {"VLLM_BUCKETING_STRATEGY": "lin", "VLLM_DECODE_BUCKETING_STRATEGY": "exp", "VLLM_PROMPT_BS_BUCKET_LIMIT": "3"}
    )
    plan = make_plan(Limits(2048, 8), settings=settings)
    assert plan.provenance.strategy == "prompt linear, decode exponential"
    assert "limit" in plan.provenance.parameters["decode_batch"]
    assert "limit" not in plan.provenance.parameters["prompt_batch"]
    (note,) = [note for note in plan.provenance.notes if note.kind == "warning"]
    assert note.text == "VLLM_PROMPT_BS_BUCKET_LIMIT has no effect: the linear strategy has no limit"


def test_variables_that_a_flag_overrules_have_no_effect():
    settings = Settings.from_environment(
        {"VLLM_BUCKETING_STRATEGY": "exp", "VLLM_PROMPT_BS_BUCKET_MAX": "3", "VLLM_BUCKETING_FROM_FILE": "x"}
    )
    given = Range(1, 1, 2, "--prompt-batch")
    plan = make_plan(Limits(64), "linear", settings=settings, prompt_batch=given)
    assert [note.text for note in plan.provenance.notes if note.kind == "warning"] == [
        "VLLM_PROMPT_BS_BUCKET_MAX has no effect: --prompt-batch is given",
        "VLLM_BUCKETING_FROM_FILE has no effect: the strategy is linear (flag)",
        "VLLM_BUCKETING_STRATEGY has no effect: the strategy is linear (flag)",
    ]


def test_a_number_its_strategy_does_not_know_is_refused():
    with pytest.raises(InputError, match="--prompt-batch 1,2,4: the linear strategy has no limit; leave it out"):
        make_plan(Limits(64), prompt_batch=Range.of("--prompt-batch", (1, 2, 4, 3)))
    with pytest.raises(InputError, match="--prompt-batch '1,2' is not MIN,STEP,MAX"):
        Range.of("--prompt-batch", (1, 2))


def test_the_gap_of_the_tpu_rule_comes_from_its_variable():
    settings = Settings.from_environment({"VLLM_TPU_BUCKET_PADDING_GAP": "256"})
    plan = make_plan(Limits(2048, 1), "powers-of-two-tpu", settings=settings)
    assert plan.provenance.origins["prompt_query.step"] == "environment VLLM_TPU_BUCKET_PADDING_GAP"
    assert {bucket.query for bucket in plan.prompt} >= {16, 32, 64, 128, 256, 512, 768, 1024}
    other = make_plan(Limits(2048, 1), settings=settings)
    assert "VLLM_TPU_BUCKET_PADDING_GAP has no effect" in other.provenance.notes[0].text


def test_ranges_that_do_not_reach_the_limits_are_completed():
    plan = make_plan(
        Limits(8192, 4),
        traffic=Traffic(SAMPLE),
        prompt_query=Range(1, 1, 1024),
        decode_batch=Range(1, 1, 2),
        decode_context=Range(128, 128, 1024),
        budget=Budget(max_graphs=10),
    )
    assert prove(plan.limits, plan.buckets) == []
    assert max(bucket.query for bucket in plan.prompt) == 1024
    assert Bucket("decode", 4, 1, 8192) in plan.decode
    texts = [note.text for note in plan.provenance.notes]
    assert any("the prompt ranges alone do not cover the limits: context 7168" in text for text in texts)
    assert any("the decode ranges alone do not cover the limits: batch 4 and context 8192" in text for text in texts)
    found = replay(plan, Traffic(SAMPLE))
    assert found.prompt.uncovered == found.decode.uncovered == 0


def test_ranges_in_which_no_bucket_lies_are_refused():
    with pytest.raises(InputError, match="no prompt bucket lies within the prompt ranges and the limits"):
        make_plan(Limits(64, 4, 16), traffic=Traffic(SAMPLE, clip=True), prompt_query=Range(32, 8, 64))


@pytest.mark.parametrize("strategy", ["linear", "exponential", "padding-aware", "powers-of-two", "powers-of-two-tpu"])
def test_lengths_above_the_captured_ones_get_only_what_coverage_needs(strategy):
    settings = Settings.from_environment({"MAX_SEQ_LEN_TO_CAPTURE": "1024"})
    plan = make_plan(Limits(4096, 4), strategy, settings=settings)
    assert prove(plan.limits, plan.buckets) == []
    assert plan.provenance.origins["prompt_query.max"] == "environment MAX_SEQ_LEN_TO_CAPTURE"
    assert len([bucket for bucket in plan.decode if bucket.context > 1024]) == 1
    assert max(bucket.query for bucket in plan.prompt) <= 1024
    assert (
        plan_from(PlanInputs(Limits(4096, 4), strategy, max_seq_len_to_capture=1024), Budget(), None, {}).buckets
        == plan.buckets
    )
    whole = make_plan(Limits(1024, 4), strategy, settings=settings)
    assert "environment MAX_SEQ_LEN_TO_CAPTURE" not in whole.provenance.origins.values()


def test_traffic_beside_a_rule_shows_the_padding_of_the_rule():
    plan = make_plan(LIMITS, "exponential", traffic=Traffic(SAMPLE))
    assert plan.buckets == make_plan(LIMITS, "exponential").buckets
    assert plan.provenance.facts["prompt_padding"] == pytest.approx(padding(plan), abs=1e-6)
    assert "judged on 1,500 recorded requests" in plan_text(plan)
    assert "expected prompt padding" in plan_text(plan)


def test_cached_prefixes_are_taken_over_where_contexts_are_allowed(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        f'{{"time": {i}, "prompt_tokens": {600 + i % 50}, "output_tokens": 4, "cached_tokens": {512 * (i % 2)}}}\n'
        for i in range(60)
    ]
    path.write_text("".join(lines))
    again = make_plan(Limits(1024, 1), traffic=Traffic(path), budget=Budget(max_graphs=6))
    (note,) = [note for note in again.provenance.notes if note.kind == "warning"]
    assert "30 prompts have a cached prefix and recompute it" in note.text
    assert padding(again, path=path) > 0.5
    reused = make_plan(
        Limits(1024, 1), traffic=Traffic(path), budget=Budget(max_graphs=6), prompt_context=Range(0, 128, 1024)
    )
    assert any(bucket.context == 512 for bucket in reused.prompt)
    assert padding(reused, path=path) < 0.1
    assert prove(reused.limits, reused.buckets) == []


def test_a_count_of_the_whole_batchs_blocks_is_pointed_out():
    settings = Settings.from_environment({"VLLM_DECODE_BLOCK_BUCKET_STEP": "128"})
    plan = make_plan(Limits(2048, 4), settings=settings)
    (warning,) = [note.text for note in plan.provenance.notes if note.kind == "warning"]
    assert warning.startswith("VLLM_DECODE_BLOCK_BUCKET_STEP=128 counts the blocks of one sequence, which exceed")
    assert warning.endswith("divide by max_num_seqs")


def test_padding_that_no_bucket_avoids_does_not_count_against_the_budget():
    plan = plan_from(PlanInputs(Limits(8192, 8), traffic=Traffic(SAMPLE)), Budget(max_padding=0.1), None, {})
    judged = replay(plan, Traffic(SAMPLE)).decode
    assert judged.ragged_padding > 0.5
    assert judged.padding - judged.ragged_padding <= 0.1


@full
def test_a_budget_of_padding_is_met_with_no_graph_to_spare():
    for goal in (0.3, 0.12, 0.07):
        plan = make_plan(LIMITS, traffic=Traffic(SAMPLE), budget=Budget(max_padding=goal))
        for phase in ("prompt", "decode"):
            graphs = len(getattr(plan, phase))
            fewer = make_plan(LIMITS, traffic=Traffic(SAMPLE), budget=Budget(max_graphs=graphs - 1))
            assert padding(plan, phase) <= goal < padding(fewer, phase)
