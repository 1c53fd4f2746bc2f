"""From steps to lists within a budget, by any server's rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import BucketRules, GraphCost, GraphDemand, Setup, Shape
from llmc.integrations.evaluation import evaluate
from llmc.integrations.observed import TrafficSource, observe, parts
from llmc.integrations.settings import complete
from llmc.integrations.tune import MOST_PRICE, ServerBudget, Tuned, tune, tune_on
from tests.integrations.fake import Fake
from tests.integrations.judging import counted
from tests.tiers import default_cases, full

counts = st.dictionaries(st.integers(1, 64), st.integers(1, 50), min_size=1, max_size=12)


def demands(tokens: dict[int, int]) -> dict[str, dict[tuple[int, ...], GraphDemand]]:
    return {
        "tokens": {(n,): GraphDemand("tokens", (n,), steps, n * steps) for n, steps in tokens.items()},
        "decode": {(n,): GraphDemand("decode", (n,), steps, n * steps) for n, steps in tokens.items() if n <= 8},
    }


@full
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts)
def test_as_many_graphs_as_the_servers_own_pad_no_more(fake: Fake, setup: Setup, tokens: dict[int, int]) -> None:
    tuned = tune(fake, setup, demands(tokens), ServerBudget())
    assert tuned.chosen.graphs <= tuned.default.graphs
    for name in ("tokens", "decode"):
        assert tuned.chosen.family(name).padded <= tuned.default.family(name).padded
    assert tuned.chosen.missing == 0


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts, st.integers(1, 28))
def test_a_budget_is_kept(fake: Fake, setup: Setup, tokens: dict[int, int], most: int) -> None:
    assert tune(fake, setup, demands(tokens), ServerBudget(graphs=most)).chosen.graphs <= most


@pytest.mark.parametrize(("name", "most"), [("optimum-rbln", 3), ("optimum-rbln", 6), ("vllm", 21), ("sglang", 14)])
def test_a_budget_is_used_up_and_a_family_has_what_it_needs(name: str, most: int) -> None:
    server = bucket_rules(name)
    limits = server.limits({"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 8192})
    limited = Setup(limits, complete(server.settings, {}))
    tokens: dict[Shape, GraphDemand] = {(n,): GraphDemand("", (n,), 65 - n, n) for n in range(1, 65)}
    tuned = tune(server, limited, {family.name: tokens for family in server.families}, ServerBudget(graphs=most))
    assert tuned.chosen.graphs == most


@pytest.mark.parametrize("largest", [8, 16, 64, 96, 512])
@pytest.mark.parametrize("seqs", [1, 16, 64])
def test_lists_within_as_many_graphs_as_vllms_own_are_found_for_any_largest_size(largest: int, seqs: int) -> None:
    """A size at or below max_num_seqs is two graphs, so graphs are not in proportion to sizes."""
    server = bucket_rules("vllm")
    limits = server.limits({"max_model_len": 1024, "max_num_seqs": seqs, "max_num_batched_tokens": 1024})
    setup = Setup(limits, complete(server.settings, {"max_cudagraph_capture_size": largest}))
    demands = {"tokens": counted("tokens", {n: 1 + 1000 // n for n in range(1, 700, 3)})}
    shifts = {"uniform": {"tokens": counted("tokens", dict.fromkeys(range(1, largest + 1), 1))}}
    found = tune(server, setup, demands, ServerBudget(), shifts=shifts)
    assert found.chosen.graphs <= found.default.graphs
    assert found.chosen.padding["tokens"] <= found.default.padding["tokens"] + MOST_PRICE


def test_times_and_sizes_are_graphs_by_what_one_takes() -> None:
    cost = GraphCost(2.0, 1 << 20, "here")
    assert ServerBudget(9, 14.0, 5 << 20).most(cost) == 5
    assert ServerBudget().most(cost) is None
    with pytest.raises(InputError, match=r"graph memory needs what one graph takes \(here\): give --graph-bytes"):
        ServerBudget(graph_bytes=5).most(GraphCost(2.0, None, "here"))
    with pytest.raises(InputError, match="allows no graph"):
        ServerBudget(warmup_seconds=1.0).most(cost)


PEAKS = {"tokens": counted("tokens", {3: 400, 11: 400, 13: 400, 37: 50}), "decode": counted("decode", {3: 400, 5: 100})}
"""Traffic for which the best list has no size near most others."""
OTHER = {"tokens": counted("tokens", dict.fromkeys(range(1, 65), 1)), "decode": counted("decode", {6: 1, 7: 9})}


def test_a_plan_pads_other_traffic_no_more_than_the_servers_own_lists(fake: Fake, setup: Setup) -> None:
    alone = tune(fake, setup, PEAKS, ServerBudget(), shifts={"other": OTHER}, hedge=0.0)
    assert alone.worse == {"other": ["tokens"]} and alone.price == {"tokens": 0, "decode": 0}
    hedged = tune(fake, setup, PEAKS, ServerBudget(), shifts={"other": OTHER})
    assert hedged.chosen.graphs <= hedged.default.graphs and hedged.unhedged == alone.chosen
    for name in ("tokens", "decode"):
        gain = hedged.default.family(name).padding - alone.chosen.family(name).padding
        assert hedged.price[name] <= min(MOST_PRICE, max(0.0, gain / 2)) + 1e-9
        own, chosen = (one.family(name).padding for one in hedged.shifts["other"])
        assert chosen < alone.shifts["other"][1].family(name).padding or chosen <= own


def test_a_given_hedge_weighs_all_shifts_alike(fake: Fake, setup: Setup) -> None:
    shifts = {"one": OTHER, "two": PEAKS}
    found = tune(fake, setup, PEAKS, ServerBudget(), shifts=shifts, hedge=0.5)
    assert found.weights == {"tokens": {"one": 0.5, "two": 0.5}, "decode": {"one": 0.5, "two": 0.5}}
    for wrong in (-0.1, 1.0):
        with pytest.raises(InputError, match="a hedge is a share from 0 to below 1, not"):
            tune(fake, setup, PEAKS, ServerBudget(), shifts=shifts, hedge=wrong)


@full
def test_graphs_move_to_the_family_that_gains_by_them() -> None:
    """SGLang's own lists have more sizes for prefills than these steps need."""
    server = bucket_rules("sglang")
    setup = Setup(server.limits({"max_model_len": 8192, "max_num_seqs": 128}), complete(server.settings, {}))
    demands = {
        "decode": counted("decode", dict.fromkeys(range(1, 129), 5)), "prefill": counted("prefill", {64: 9, 128: 9}),
    }  # fmt: skip
    found = tune(server, setup, demands, ServerBudget())
    assert found.chosen.graphs <= found.default.graphs
    assert len(found.plan.lists["decode"]) > len(found.default_lists["decode"])
    assert found.chosen.padding["prefill"] == 0


@default_cases(1)
@pytest.mark.parametrize("name", ["vllm", pytest.param("vllm-gaudi", marks=full), "sglang", "tpu-inference"])
def test_on_a_recorded_log_the_plan_is_better_on_the_half_that_it_did_not_see(name: str) -> None:
    server = bucket_rules(name)
    limits = server.limits({"max_model_len": 8192, "max_num_seqs": 32, "max_num_batched_tokens": 2048})
    found = tuned_on(server, Setup(limits, complete(server.settings, {})), SAMPLE)
    for own, plan in found.held_out.values():
        assert plan.worst < own.worst
    assert all(price <= MOST_PRICE for price in found.price.values())
    if name in ("vllm-gaudi", "tpu-inference"):
        assert not found.worse


def test_a_family_that_counts_in_no_total_is_planned_by_its_own_steps() -> None:
    """Attention's requests on TPUs: their padding says little about time, and their list follows the traffic."""
    server = bucket_rules("tpu-inference")
    limits = server.limits({"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 2048})
    setup = Setup(limits, complete(server.settings, {"bucketized_requests": True}))
    demands = {"tokens": counted("tokens", {40: 50, 300: 9}), "requests": counted("requests", {11: 70, 23: 40})}
    shifts = {"other": {"tokens": counted("tokens", dict.fromkeys(range(16, 2048, 16), 1))}}
    for hedge in (None, 0.0, 0.2):
        found = tune(server, setup, demands, ServerBudget(), shifts=shifts, hedge=hedge)
        assert found.chosen.padding["requests"] < found.default.padding["requests"]
        assert (11,) in found.plan.lists["requests"] or (16,) in found.plan.lists["requests"]


SAMPLE = Path(__file__).parents[1] / "data" / "azure_conv_sample.csv"


def tuned_on(server: BucketRules, setup: Setup, path: Path) -> Tuned:
    source = TrafficSource(str(path))
    return tune_on(server, setup, source, observe(server, setup, source), ServerBudget())


def trace(path: Path, *lines: str) -> Path:
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return path


def test_a_short_log_is_held_out_by_its_second_half(fake: Fake, setup: Setup, tmp_path: Path) -> None:
    rows = [f"2026-01-01 00:00:{second:02},{8 if second < 20 else 30},4" for second in range(40)]
    path = trace(tmp_path / "t.csv", *rows)
    source = TrafficSource(str(path))
    first, second = parts(fake, setup, source, observe(fake, setup, source))
    assert (first.name, first.requests, second.name, second.requests) == ("the first half", 20, "the second half", 20)
    assert max(first.demands["tokens"]) < (30,) <= max(second.demands["tokens"])
    found = tuned_on(fake, setup, path)
    (own, plan) = found.held_out["the second half"]
    assert own == evaluate(fake, setup, found.default_lists, second.demands) and plan != found.chosen


def test_days_are_held_out_each_by_itself(fake: Fake, setup: Setup, tmp_path: Path) -> None:
    rows = [f"2026-01-0{1 + hour // 24} {hour % 24:02}:00:00Z,{8 + hour // 24},4" for hour in range(5, 96)]
    path = trace(tmp_path / "t.csv", *rows)
    source = TrafficSource(str(path))
    observed = observe(fake, setup, source)
    found = [(part.name, part.requests) for part in parts(fake, setup, source, observed)]
    assert found == [("the first half", 43), ("2026-01-03", 24), ("2026-01-04", 24)]
    assert list(tuned_on(fake, setup, path).held_out) == ["2026-01-03", "2026-01-04"]
    assert str(observed.period) == "2026-01-01 05:00:00 to 2026-01-04 23:00:00 UTC"
    relative = trace(tmp_path / "r.csv", *(f"{3600 * hour},8,4" for hour in range(96)))
    source = TrafficSource(str(relative))
    observed = observe(fake, setup, source)
    assert [part.name for part in parts(fake, setup, source, observed)] == ["the first half", "day 3", "day 4"]
    assert str(observed.period) == "3 days, 23:00:00 without a date"
    closer = TrafficSource(str(relative), arrival_rate=2.0)
    assert [part.requests for part in parts(fake, setup, closer, observe(fake, setup, closer))] == [48, 48]


def test_what_has_no_order_of_requests_is_not_held_out(fake: Fake, setup: Setup, tmp_path: Path) -> None:
    one = trace(tmp_path / "t.csv", "0,8,4")
    found = tuned_on(fake, setup, one)
    assert found.held_out == {} and list(found.shifts) == ["lengths × 0.5", "lengths × 2", "uniform steps"]
