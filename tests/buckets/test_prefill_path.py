"""How groups of prompts run: shared, split, chunked, taken over from a cached prefix, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.lookup import PrefillStep, prefill_path
from llmc.buckets.plan import Plan, Provenance
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.strategies.base import Range
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY, plan_arguments


def plan_of(limits: Limits, *prompt: tuple[int, int, int]) -> Plan:
    decode = Bucket("decode", limits.max_num_seqs, 1, limits.max_model_len)
    return Plan(limits, (*(Bucket("prompt", *row) for row in prompt), decode), Provenance("by hand"))


def check(plan: Plan, lengths: list[int], past: list[int]) -> list[PrefillStep]:
    """Run the path on counters: every step fits its bucket and starts where its rows are."""
    steps = prefill_path(plan, lengths, past)
    done: dict[int, int] = {}
    for step in steps:
        assert step.bucket in plan.prompt
        assert len(step.rows) == len(step.spans) == len(set(step.rows)) <= step.bucket.batch
        assert list(step.rows) == sorted(step.rows)
        for row, (start, stop) in zip(step.rows, step.spans, strict=True):
            assert start < stop
            assert start == done[row] if row in done else start <= past[row]
            assert step.bucket.covers(1, stop - start, start)
            done[row] = stop
    assert done == dict(enumerate(lengths))
    return steps


def test_the_guides_group_is_one_step(guide_plan):
    (step,) = check(guide_plan, [412, 20, 300], [0, 0, 0])
    assert step == PrefillStep(Bucket("prompt", 4, 512, 0), (0, 1, 2), ((0, 412), (0, 20), (0, 300)))


def test_a_group_above_the_largest_batch_is_split():
    plan = plan_of(Limits(64, 8), (2, 63, 0))
    assert [step.rows for step in check(plan, [5, 6, 7], [0, 0, 0])] == [(0,), (1, 2)]


def test_prompts_share_no_step_where_padding_costs_more_than_another_step():
    plan = make_plan(Limits(8192, 4))
    assert [step.rows for step in check(plan, [8000, 20], [0, 0])] == [(0,), (1,)]
    assert [step.rows for step in check(plan, [120, 20], [0, 0])] == [(0, 1)]


def test_a_long_prompt_is_cut_into_the_longest_chunks():
    plan = plan_of(Limits(64, 1), (1, 16, 0), (1, 16, 48))
    (one, two, three) = check(plan, [40], [0])
    assert [one.spans, two.spans, three.spans] == [((0, 16),), ((16, 32),), ((32, 40),)]
    assert [step.bucket.context for step in (one, two, three)] == [0, 48, 48]


def test_chunks_stop_early_where_going_further_would_be_stuck():
    plan = plan_of(Limits(1200, 1), (1, 1000, 100))
    assert [step.spans for step in check(plan, [1100], [0])] == [((0, 100),), ((100, 1100),)]


def test_rows_of_different_lengths_share_their_chunks():
    plan = plan_of(Limits(64, 2), (2, 16, 48))
    assert [step.rows for step in check(plan, [40, 20], [0, 0])] == [(0, 1), (0, 1), (0,)]


def test_a_cached_prefix_is_not_computed_again():
    plan = plan_of(Limits(64, 1), (1, 64, 0), (1, 8, 32))
    (step,) = check(plan, [40], [32])
    assert step == PrefillStep(Bucket("prompt", 1, 8, 32), (0,), ((32, 40),))


def test_a_prefix_that_no_bucket_takes_over_from_is_computed_again():
    (step,) = check(plan_of(Limits(64, 1), (1, 64, 0)), [40], [32])
    assert step.spans == ((0, 40),)


@pytest.mark.parametrize(
    ("lengths", "past", "message"),
    [
        ([], [], "a group of 0 prompts; max_num_seqs allows 1 to 4"),
        ([1] * 5, [0] * 5, "a group of 5 prompts; max_num_seqs allows 1 to 4"),
        ([8, 1025], [0, 0], "prompt 1 has 1025 tokens; max_prompt_len allows 1 to 1024"),
        ([0], [0], "prompt 0 has 0 tokens"),
        ([8], [8], "prompt 0 has 8 of 8 tokens in the cache"),
        ([8], [-1], "prompt 0 has -1 of 8 tokens in the cache"),
        ([8], [], "1 lengths but 0 pasts"),
    ],
)
def test_a_group_that_is_not_admissible_is_refused(guide_plan, lengths, past, message):
    with pytest.raises(InputError, match=message):
        prefill_path(guide_plan, lengths, past)


def test_the_length_limit_is_named_after_the_model_when_no_other_is_set():
    plan = make_plan(Limits(64))
    with pytest.raises(InputError, match="max_model_len - 1 allows 1 to 63"):
        prefill_path(plan, [64])


def test_a_plan_by_hand_that_does_not_reach_is_refused():
    with pytest.raises(InputError, match="prompt 0 of 40 tokens is not covered by this plan"):
        prefill_path(plan_of(Limits(64, 1), (1, 16, 0)), [40])


@PROPERTY
@given(plan_arguments(), st.data())
def test_every_admissible_group_has_a_path(arguments, data):
    try:
        plan = make_plan(**arguments)
    except InputError:
        return
    lengths = data.draw(
        st.lists(st.integers(1, plan.limits.longest_prompt), min_size=1, max_size=plan.limits.max_num_seqs)
    )
    past = [data.draw(st.integers(0, length - 1)) for length in lengths]
    steps = check(plan, lengths, past)
    assert steps == prefill_path(plan, lengths, past)
    check(plan, lengths, [0] * len(lengths))


def test_every_length_of_a_token_limited_plan_has_a_path():
    plan = make_plan(Limits(1000, 6, 300), prompt_query=Range(64, 64, 300))
    for length in range(1, 1000):
        check(plan, [length], [0])
