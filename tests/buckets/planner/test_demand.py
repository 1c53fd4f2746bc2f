"""From steps of a schedule to what the optimiser is asked, and the grouping of prompts before there is a plan."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.work import STEP_WEIGHT, TOKEN_WEIGHT
from llmc.buckets.evaluation.replay import evaluate
from llmc.buckets.limits import Limits
from llmc.buckets.planner import demand
from llmc.buckets.planner.candidates import Candidates
from llmc.buckets.planner.demand import FreeGrouping, PlanGrouping, observe, uniform, ways
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.traffic.events import DecodeRun, PromptGroup
from tests.buckets.generators import PROPERTY


def free(limits: Limits, batches, queries, contexts=(0,), phase="prompt") -> Candidates:
    return Candidates(phase, limits, tuple(np.array(values, np.int64) for values in (batches, queries, contexts)))


def group(*lengths: int, cached: tuple[int, ...] | None = None) -> PromptGroup:
    return PromptGroup(lengths, cached or (0,) * len(lengths))


def test_prompts_are_tried_in_ever_wider_steps():
    candidates = free(Limits(100, 6, block_size=10), range(1, 7), range(1, 100))
    narrow, *caps = ways(candidates)
    assert [int(part.values[0][-1]) for part in caps] == [1, 2, 4, 6]
    assert [len(values) for values in narrow.values] == [1, 99, 1]


def test_short_prompts_share_a_step_and_long_ones_do_not():
    candidates = free(Limits(8192, 4), range(1, 5), range(1, 8192))
    grouping = FreeGrouping(candidates)
    assert grouping.steps(group(100, 90, 110)) == [(3, 110, 0)]
    assert sorted(grouping.steps(group(100, 8000))) == [(1, 100, 0), (1, 8000, 0)]
    assert sorted(FreeGrouping(candidates.up_to_batch(1)).steps(group(100, 90))) == [(1, 90, 0), (1, 100, 0)]


def step_cost(batch: int, query: int, context: int) -> int:
    return batch * query * (TOKEN_WEIGHT + query + context) + STEP_WEIGHT


@PROPERTY
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=7), st.integers(1, 5), st.sampled_from([1, 64, 500]),
    st.integers(3000, 9000),
)  # fmt: skip
def test_grouping_costs_least_among_neighbours_in_length(lengths, widest, grain, most):
    """Against every way to cut the sorted lengths into steps."""
    limits = Limits(4000, 8, most)
    batches = [batch for batch in (1, 2, 3, 4, 5, 8) if batch <= widest and batch != 3] or [1]
    widest = batches[-1]
    steps = FreeGrouping(free(limits, batches, range(grain, 4001, grain))).steps(group(*lengths))
    assert sum(batch for batch, _, _ in steps) == len(lengths)
    assert all(batch <= widest for batch, _, _ in steps)

    def rounded(batch: int, query: int) -> tuple[int, int]:
        return next(b for b in batches if b >= batch), -(-query // grain) * grain

    def total(parts: list[tuple[int, int]]) -> float:
        cost = 0.0
        for batch, query in parts:
            b, q = rounded(batch, query)
            if b * q > most and batch > 1:
                return float("inf")
            cost += step_cost(b, q, 0)
        return cost

    ordered = sorted(lengths)
    best = float("inf")
    for cuts in product([False, True], repeat=len(ordered) - 1):
        parts, size = [], 1
        for index, cut in enumerate(cuts):
            if cut:
                parts.append((size, ordered[index]))
                size = 0
            size += 1
        parts.append((size, ordered[-1]))
        if all(batch <= widest for batch, _ in parts):
            best = min(best, total(parts))
    assert total([(batch, query) for batch, query, _ in steps]) == pytest.approx(best)


def test_long_prompts_run_in_chunks_up_to_the_largest_context():
    limits = Limits(5001, 2, 2048)
    candidates = free(limits, [1], range(1, 2049), range(0, 2953, 8))
    grouping = FreeGrouping(candidates)
    assert grouping.steps(group(5000)) == [(1, 2048, 0), (1, 904, 2048), (1, 2048, 2952)]
    assert grouping.steps(group(5000, cached=(2500,))) == [(1, 452, 2500), (1, 2048, 2952)]
    assert grouping.steps(group(5000, cached=(4500,))) == [(1, 2048, 2952)]
    farther = free(limits, [1], range(1, 2049), range(0, 5001, 8))
    assert FreeGrouping(farther).steps(group(5000)) == [(1, 2048, 0), (1, 2048, 2048), (1, 904, 4096)]
    assert FreeGrouping(farther).steps(group(5000, cached=(4500,))) == [(1, 500, 4500)]


def test_what_a_plan_would_run_is_what_evaluation_counts():
    plan = make_plan(Limits(1024, 4), "exponential")
    events = [group(100, 300, 900), DecodeRun(3, 900, 1303, 40), group(5)]
    prompt = Candidates.of("prompt", plan.limits, plan.prompt)
    decode = Candidates.of("decode", plan.limits, plan.decode)
    found = observe(iter(events), [(prompt, PlanGrouping(plan))], decode)
    judged = evaluate(plan, events)
    for one in (judged.prompt, judged.decode):
        (known,) = found[one.phase]
        assert known.demand.weights.sum() == one.steps
        assert known.real == one.real_tokens
        assert known.exact == one.exact_tokens


def test_decode_runs_are_counted_at_the_contexts_they_round_up_to():
    limits = Limits(64, 2, block_size=16)
    decode = free(limits, [1, 2], [1], [16, 32, 64], "decode")
    (found,) = observe([DecodeRun(2, 15, 20, 4), DecodeRun(1, 33, 33, 5)], [], decode)["decode"]
    known = found.demand
    counted = dict(zip(map(tuple, known.points.tolist()), known.weights.tolist(), strict=True))
    assert counted == {(2, 1, 16): 2, (2, 1, 32): 2, (1, 1, 64): 5}
    assert found.real == (20 + 22 + 24 + 26) + (33 + 34 + 35 + 36 + 37)
    assert found.exact == 2 * (15 + 16 + 17 + 18) + (33 + 34 + 35 + 36 + 37)


def test_too_many_steps_to_tell_apart_are_rounded_up_a_little(monkeypatch):
    limits = Limits(8192, 1)
    prompt = free(limits, [1], range(1, 8192))
    decode = free(limits, [1], [1], [8192], "decode")
    events = [group(length) for length in range(1, 8192, 3)]
    exact = observe(events, [(prompt, FreeGrouping(prompt))], decode)["prompt"][0].demand
    monkeypatch.setattr(demand, "MAX_STEPS", 500)
    coarse = observe(events, [(prompt, FreeGrouping(prompt))], decode)["prompt"][0].demand
    assert coarse.weights.sum() == exact.weights.sum() == len(events)
    assert len(coarse.points) < 2000 < len(exact.points)
    assert coarse.points[:, 1].max() <= 8191
    tokens = [(found.points[:, 1] * found.weights).sum() for found in (exact, coarse)]
    assert tokens[0] <= tokens[1] <= tokens[0] * (1 + 1 / 256)


@pytest.mark.parametrize("phase", ["prompt", "decode"])
def test_uniform_demand_counts_every_step_once(phase):
    limits = Limits(12, 4, block_size=4)
    column = [3, 7, 12]
    known = free(limits, [1, 2, 4], column if phase == "prompt" else [1], [0] if phase == "prompt" else column, phase)
    lengths = range(1, 13) if phase == "prompt" else range(13)
    steps = [(batch, length) for batch in range(1, 5) for length in lengths]
    for cap in (4,) if phase == "decode" else (1, 2, 4):
        found = uniform(known.up_to_batch(cap), 4)
        assert found.real == found.exact == pytest.approx(sum(batch * length for batch, length in steps))
        assert found.demand.weights.sum() == sum(-(-batch // cap) for batch, _ in steps)
        assert found.demand.points[:, 0].max() == cap


def test_candidates_know_the_bucket_that_covers_everything():
    limits = Limits(100, 3, block_size=10)
    assert free(limits, [1, 2], [50, 100]).covers_all() == (1, 100, 0)
    assert free(limits, [1, 2], [20, 50], [0, 60]).covers_all() == (1, 50, 60)
    assert free(limits, [1, 2], [20, 50], [0, 40]).covers_all() is None
    assert free(limits, [1, 2, 4], [1], [50, 99, 100], "decode").covers_all() == (4, 1, 99)
    assert free(limits, [1, 2], [1], [100], "decode").covers_all() is None
    listed = Candidates.of("prompt", limits, [Bucket("prompt", 2, 99, 0), Bucket("prompt", 1, 40, 60)])
    assert listed.covers_all() == (2, 99, 0)
    assert listed.up_to_batch(1).covers_all() == (1, 40, 60)
