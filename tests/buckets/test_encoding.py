"""Plans for models without a cache: batches by length, and the lengths that pad recorded texts least."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.encoding import STEP_TOKENS, EncodePlan, batches, encode_plan, padding, traffic_plan
from llmc.errors import InputError

PLAN = encode_plan("embed", 700, 8)
LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=60)


@given(LENGTHS, st.booleans())
def test_every_row_runs_once_in_a_batch_that_covers_it(lengths: list[int], exact: bool) -> None:
    built = batches(lengths, PLAN, exact)
    assert sorted(row for batch in built for row in batch.rows) == list(range(len(lengths)))
    shapes = {(bucket.batch, bucket.query) for bucket in PLAN.buckets}
    for batch in built:
        longest = max(lengths[row] for row in batch.rows)
        assert batch.batch >= len(batch.rows) and batch.tokens >= longest
        if exact:
            assert (batch.batch, batch.tokens) == (len(batch.rows), longest)
            assert batch.batch == 1 or batch.batch * batch.tokens <= STEP_TOKENS
        else:
            assert (batch.batch, batch.tokens) in shapes


def test_neighbours_in_length_share_batches() -> None:
    built = batches([3, 700, 4, 690, 5], PLAN, exact=True)
    assert [batch.rows for batch in built] == [(1,), (3,), (4, 2, 0)]


def test_shorter_texts_join_a_longer_bucket_only_where_it_has_locations_left() -> None:
    built = batches([700, 690, 680, 3, 4, 5, 6], PLAN, exact=False)
    assert [(batch.batch, batch.tokens) for batch in built] == [(4, 700), (4, 16)]
    assert [len(batch.rows) for batch in built] == [4, 3]


def test_a_plan_is_read_as_it_was_written() -> None:
    assert EncodePlan.from_json(PLAN.to_json()).to_json() == PLAN.to_json()


TEXTS = {5: 40, 6: 10, 11: 7, 30: 25, 31: 1, 90: 2}


def computed(lengths: tuple[int, ...]) -> int:
    return sum(min(size for size in lengths if size >= tokens) * number for tokens, number in TEXTS.items())


def test_lengths_are_those_of_least_padding() -> None:
    built = traffic_plan("embed", TEXTS, 128, max_num_seqs=1, max_graphs=3)
    found = tuple(bucket.query for bucket in built.buckets)
    best = min(((*two, 128) for two in combinations(TEXTS, 2)), key=computed)
    assert found == best == (6, 31, 128)
    assert built.provenance.facts["padding"] == round(1 - sum(t * n for t, n in TEXTS.items()) / computed(best), 4)


def test_every_length_has_its_batches_within_the_number_of_graphs() -> None:
    built = traffic_plan("score", TEXTS, 128, max_num_seqs=4, max_graphs=8)
    shapes = {(bucket.batch, bucket.query) for bucket in built.buckets}
    assert shapes == {(batch, tokens) for batch in (1, 2, 4) for tokens in (31, 128)}, "a third length has no room"
    assert len(traffic_plan("score", TEXTS, 128, max_num_seqs=4).buckets) <= len(encode_plan("score", 128, 4).buckets)
    with pytest.raises(InputError, match="--max-graphs 2: one length alone takes 3"):
        traffic_plan("embed", TEXTS, 128, max_num_seqs=4, max_graphs=2)


def test_texts_pad_less_than_in_powers_of_two_and_far_less_than_to_the_longest() -> None:
    built = traffic_plan("embed", TEXTS, 128, max_num_seqs=8)
    powers = padding(encode_plan("embed", 128, 8), TEXTS)
    found = built.provenance.facts
    assert float(found["padding"]) < float(powers["padding"]) < float(powers["padding_to_the_longest"])
    assert found["padding_to_the_longest"] == round(1 - 1298 / (90 * 85), 4)
    assert "85 recorded texts, 1298 tokens: padding" in built.text()


def test_longer_texts_count_as_the_longest_that_the_model_takes() -> None:
    built = traffic_plan("embed", {10: 1, 500: 3}, 64, max_num_seqs=1, facts={"traffic_sha256": "0"})
    assert [bucket.query for bucket in built.buckets] == [10, 64]
    assert built.provenance.facts["tokens"] == 10 + 3 * 64
    assert EncodePlan.from_json(built.to_json()) == built
