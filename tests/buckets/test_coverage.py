"""Coverage: the proof agrees with walking every admissible request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.coverage import Gap, gaps, prove
from llmc.buckets.limits import Limits
from llmc.buckets.lookup import prefill_path
from llmc.buckets.planner.budget import Budget
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.strategies import FILE, TRAFFIC, names
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY, buckets, plan_arguments
from tests.tiers import default_cases


def reachable(prompt: list[Bucket], longest: int) -> set[int]:
    """Prompt lengths that steps of one row compute, by trying every step from every place."""
    reached = {0}
    for start in range(longest):
        if start in reached:
            for bucket in prompt:
                if bucket.context >= start:
                    reached |= set(range(start + 1, start + bucket.query + 1))
    return reached & set(range(1, longest + 1))


def within(found: list[Gap], batch: int, length: int) -> bool:
    return any(
        gap.batches[0] <= batch <= gap.batches[1] and gap.lengths[0] <= length <= gap.lengths[1] for gap in found
    )


@PROPERTY
@given(buckets("prompt"), st.integers(2, 24))
def test_prompt_gaps_are_the_lengths_without_a_walk(known, length):
    limits = Limits(length, 5)
    found = gaps(limits, known, "prompt")
    walked = reachable(known, limits.longest_prompt)
    for prompt in range(1, limits.longest_prompt + 1):
        assert within(found, 1, prompt) == (prompt not in walked)


@PROPERTY
@given(buckets("decode"), st.integers(2, 16), st.integers(1, 6))
def test_decode_gaps_are_the_requests_without_a_bucket(known, length, seqs):
    limits = Limits(length, seqs)
    found = gaps(limits, known, "decode")
    for batch in range(1, seqs + 1):
        for context in range(limits.longest_past + 1):
            covered = any(bucket.covers(batch, 1, context) for bucket in known)
            assert within(found, batch, context) == (not covered)


def test_gaps_of_nothing_are_everything():
    limits = Limits(64, 4)
    assert gaps(limits, [], "prompt") == [Gap("prompt", (1, 4), (1, 63))]
    assert gaps(limits, [], "decode") == [Gap("decode", (1, 4), (0, 63))]


def test_decode_gaps_follow_the_staircase():
    known = [Bucket("decode", 1, 1, 63), Bucket("decode", 2, 1, 16), Bucket("decode", 3, 1, 16)]
    found = gaps(Limits(64, 4), known, "decode")
    assert found == [Gap("decode", (2, 3), (17, 63)), Gap("decode", (4, 4), (0, 63))]
    assert str(found[0]) == "decode batch 2 to 3 with 17 to 63 cached tokens"


@PROPERTY
@given(plan_arguments())
def test_every_plan_built_covers_every_admissible_request(arguments):
    try:
        plan = make_plan(**arguments)
    except InputError as error:
        assert "bucket is left, so the plan covers nothing" in str(error)
        return
    assert prove(plan.limits, plan.buckets) == []
    limits = plan.limits
    assert reachable(list(plan.prompt), limits.longest_prompt) == set(range(1, limits.longest_prompt + 1))
    for batch in range(1, limits.max_num_seqs + 1):
        for context in (0, 1, limits.longest_past // 2, limits.longest_past):
            assert plan.lookup("decode", batch, 1, context) is not None


RULES = [name for name in names() if name not in (FILE, TRAFFIC)]


@default_cases(2)
@pytest.mark.parametrize("strategy", RULES)
@PROPERTY
@given(plan_arguments(), st.none() | st.integers(1, 12), st.data())
def test_every_admissible_request_has_a_path_whatever_the_strategy_and_budget(strategy, arguments, graphs, data):
    try:
        plan = make_plan(strategy=strategy, budget=Budget(max_graphs=graphs), **arguments)
    except InputError as error:
        assert "bucket is left, so the plan covers nothing" in str(error)
        return
    limits = plan.limits
    assert prove(plan.limits, plan.buckets) == []
    if graphs is not None:
        assert max(len(plan.prompt), len(plan.decode)) <= graphs
    for _ in range(4):
        batch = data.draw(st.integers(1, limits.max_num_seqs))
        lengths = data.draw(st.lists(st.integers(1, limits.longest_prompt), min_size=batch, max_size=batch))
        past = [data.draw(st.integers(0, length - 1)) for length in lengths]
        for step in prefill_path(plan, lengths, past):
            for start, stop in step.spans:
                assert step.bucket.covers(len(step.rows), stop - start, start)
        cached = data.draw(st.integers(0, limits.longest_past))
        bucket = plan.lookup("decode", batch, 1, cached)
        assert bucket is not None
        assert bucket.covers(batch, 1, cached)
        requested = (batch, data.draw(st.integers(1, limits.max_model_len)), cached)
        found = plan.lookup("prompt", *requested)
        assert found is None or found.covers(*requested)
