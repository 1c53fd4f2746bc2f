"""A request that no single bucket covers: chunked, split or refused, never run unpadded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.lookup import decode_path, prefill_path
from llmc.buckets.plan import Plan, Provenance
from llmc.buckets.planner.planner import make_plan
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY

GAPPY = Plan(
    Limits(64, 4, block_size=16),
    tuple(
        Bucket(*sizes)
        for sizes in (
            ("prompt", 1, 16, 0), ("prompt", 1, 16, 48), ("prompt", 2, 8, 0),
            ("decode", 4, 1, 16), ("decode", 2, 1, 32), ("decode", 1, 1, 64),
        )
    ),
    Provenance("by hand"),
)  # fmt: skip


def test_a_long_prompt_is_chunked_unless_the_policy_forbids_it():
    assert len(prefill_path(GAPPY, [40])) == 3
    for policy in ("split", "refuse"):
        with pytest.raises(InputError, match=f"prompt 0 of 40 tokens needs 3 chunks, which miss policy '{policy}'"):
            prefill_path(GAPPY, [40], on_miss=policy)


def test_a_group_is_split_unless_the_policy_forbids_it():
    assert sum(len(step.rows) for step in prefill_path(GAPPY, [8, 8, 8], on_miss="split")) == 3
    with pytest.raises(InputError, match="no prompt bucket covers batch 3 with 8 new and 0 cached tokens"):
        prefill_path(GAPPY, [8, 8, 8], on_miss="refuse")
    (whole,) = prefill_path(GAPPY, [5, 8], on_miss="refuse")
    assert whole.bucket == Bucket("prompt", 2, 8, 0)
    assert whole.spans == ((0, 5), (0, 8))


def test_a_decode_batch_that_a_bucket_covers_is_one_step():
    (step,) = decode_path(GAPPY, [3, 16, 9, 1])
    assert (step.bucket, step.rows) == (Bucket("decode", 4, 1, 16), (0, 1, 2, 3))


def test_a_decode_batch_in_a_gap_is_split_into_the_fewest_steps():
    steps = decode_path(GAPPY, [10, 60, 12, 9])
    assert [(str(step.bucket), step.rows) for step in steps] == [
        ("decode[4x1+16]", (0, 2, 3)),
        ("decode[1x1+64]", (1,)),
    ]
    with pytest.raises(InputError, match="no decode bucket covers batch 4 with 60 cached tokens, and miss policy"):
        decode_path(GAPPY, [10, 60, 12, 9], on_miss="refuse")


@PROPERTY
@given(st.lists(st.integers(0, 63), min_size=1, max_size=4))
def test_every_sequence_of_a_batch_decodes_once_in_a_bucket_that_covers_it(past):
    steps = decode_path(GAPPY, past)
    assert sorted(row for step in steps for row in step.rows) == list(range(len(past)))
    for step in steps:
        assert step.bucket.covers(len(step.rows), 1, max(past[row] for row in step.rows))


@PROPERTY
@given(st.lists(st.integers(0, 126), min_size=1, max_size=8))
def test_a_proven_plan_never_splits(past):
    plan = make_plan(Limits(128, 8), "exponential")
    (step,) = decode_path(plan, past, "refuse")
    assert step.bucket == plan.lookup("decode", len(past), 1, max(past))


@pytest.mark.parametrize(
    ("past", "message"),
    [
        ([], "a decode batch of 0; max_num_seqs allows 1 to 4"),
        ([1] * 5, "a decode batch of 5"),
        ([64], "sequence 0 has 64 cached tokens; max_model_len allows 0 to 63"),
        ([-1], "sequence 0 has -1 cached tokens"),
    ],
)
def test_a_batch_that_is_not_admissible_is_refused(past, message):
    with pytest.raises(InputError, match=message):
        decode_path(GAPPY, past)
