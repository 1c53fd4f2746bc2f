"""Batches by length: every row once, within the limits, with little padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.encoding import STEP_TOKENS, EncodePlan, batches, encode_plan

PLAN = encode_plan("embed", 700, 8)
LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=60)


@given(LENGTHS, st.booleans())
def test_every_row_runs_once_in_a_batch_that_covers_it(lengths: list[int], exact: bool) -> None:
    made = batches(lengths, PLAN, exact)
    assert sorted(row for batch in made for row in batch.rows) == list(range(len(lengths)))
    shapes = {(bucket.batch, bucket.query) for bucket in PLAN.buckets}
    for batch in made:
        longest = max(lengths[row] for row in batch.rows)
        assert batch.batch >= len(batch.rows) and batch.tokens >= longest
        if exact:
            assert (batch.batch, batch.tokens) == (len(batch.rows), longest)
            assert batch.batch == 1 or batch.batch * batch.tokens <= STEP_TOKENS
        else:
            assert (batch.batch, batch.tokens) in shapes


def test_neighbours_in_length_share_batches() -> None:
    made = batches([3, 700, 4, 690, 5], PLAN, exact=True)
    assert [batch.rows for batch in made] == [(1,), (3,), (4, 2, 0)]


def test_shorter_texts_join_a_longer_bucket_only_where_it_has_places_left() -> None:
    made = batches([700, 690, 680, 3, 4, 5, 6], PLAN, exact=False)
    assert [(batch.batch, batch.tokens) for batch in made] == [(4, 700), (4, 16)]
    assert [len(batch.rows) for batch in made] == [4, 3]


def test_a_plan_is_read_as_it_was_written() -> None:
    assert EncodePlan.from_json(PLAN.to_json()).to_json() == PLAN.to_json()
