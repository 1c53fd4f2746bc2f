"""Sampling from the largest logits alone: bit by bit what all logits give, which are fetched only when needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.engine.sampling.batch import sample, sample_top
from llmc.runtime.top_logits import TopLogits
from tests.runtime.engine.sampling.reference import logits, sampler
from tests.tiers import examples

PROPERTY = examples(150, database=None, derandomize=True)
SERVED = [
    {"temperature": 0},
    {"top_k": 1},
    {"top_k": 8},
    {"top_k": 5, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 8, "min_p": 0.1},
    {"min_p": 0.2},
    {"min_p": 0.02, "temperature": 2.0},
    {"min_p": 0.1, "top_p": 0.7},
    {"min_p": 1.0},
    {"min_p": 0.3, "top_k": 4000},
]
NOT_SERVED = [
    {},
    {"top_p": 0.5},
    {"top_k": 9},
    {"top_k": 5, "typical_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.1},
    {"temperature": 0, "presence_penalty": 0.1},
    {"temperature": 0, "logit_bias": {3: 1.0}},
    {"temperature": 0, "allowed_token_ids": [3]},
    {"temperature": 0, "logprobs": 0},
    {"temperature": 0, "bad": [[3]]},
    {"temperature": 0, "min_tokens": 2, "end": [4]},
]


def top_of(rows, count):
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    return TopLogits(np.take_along_axis(rows, ids, axis=1), ids)


class Full:
    """All logits, and how often they were asked for."""

    def __init__(self, rows):
        self.rows, self.calls = rows, 0

    def __call__(self):
        self.calls += 1
        return self.rows


@PROPERTY
@given(
    seed=st.integers(0, 9999),
    vocab=st.sampled_from([8, 9, 257, 5000]),
    count=st.sampled_from([1, 8, 64]),
    levels=st.sampled_from([0, 0, 1, 3]),
    spread=st.sampled_from([0.1, 2.0, 6.0]),
    kinds=st.lists(st.sampled_from(SERVED + NOT_SERVED), min_size=1, max_size=5),
)
def test_the_largest_give_what_all_give(seed, vocab, count, levels, spread, kinds):
    rows = logits(len(kinds), vocab, seed, spread)
    if levels:
        rows = np.round(rows * levels) / np.float32(levels)  # many ties, at the K-th place too
    batches = [[sampler(vocab=vocab, seed=seed + i, **kind) for i, kind in enumerate(kinds)] for _ in range(2)]
    full = Full(rows)
    for _ in range(4):
        assert sample_top(top_of(rows, min(count, vocab)), batches[0], full) == sample(rows, batches[1])
    assert [one.produced for one in batches[0]] == [4] * len(kinds)
    assert full.calls <= 4


@pytest.mark.parametrize("kind", SERVED)
def test_what_is_served_requests_nothing_more(kind):
    rows = logits(1, 5000, spread=2.0)
    rows[0, [9, 4999, 17]] = 20.0, 19.0, 18.5  # so that min_p bounds what may be drawn
    one = sampler(vocab=5000, seed=1, **kind)
    full = Full(rows)
    assert one.served_by_top(8)
    for _ in range(8):
        sample_top(top_of(rows, 8), [one], full)
    assert full.calls == 0


@pytest.mark.parametrize("kind", NOT_SERVED)
def test_what_needs_more_says_so(kind):
    rows = logits(1, 5000)
    one, full = sampler(vocab=5000, seed=1, **kind), Full(rows)
    assert not one.served_by_top(8)
    sample_top(top_of(rows, 8), [one], full)
    assert full.calls == 1


def test_min_tokens_need_more_only_until_they_are_reached():
    one = sampler(temperature=0, min_tokens=2, end=[4])
    served = []
    for _ in range(4):
        served.append(one.served_by_top(1))
        sample(logits(), [one])
    assert served == [False, False, True, True]
    assert sampler(temperature=0, min_tokens=2).served_by_top(1) and not sampler(temperature=0).served_by_top(0)


def test_min_p_over_a_flat_row_requests_all():
    rows = logits(2, 5000, spread=0.1)
    full = Full(rows)
    built = [sampler(vocab=5000, min_p=0.5, seed=1), sampler(vocab=5000, temperature=0)]
    assert sample_top(top_of(rows, 64), built, full).ids[1] == int(rows[1].argmax()) and full.calls == 1


def test_damage_is_found_in_all_logits():
    rows = logits(1, 50)
    rows[0, 7] = np.nan
    one = sampler(vocab=50, temperature=0)
    assert sample_top(top_of(np.where(np.isnan(rows), np.inf, rows), 4), [one], Full(rows)).ids == [None]
    assert "the largest logit is nan" in one.failure


def test_damage_below_the_largest_is_seen_and_stays_in_its_row():
    rows = logits(2, 50)
    top = top_of(rows, 4)
    top.values[0, 2] = np.nan
    rows[0, 7] = np.nan
    built = [sampler(vocab=50, temperature=0) for _ in range(2)]
    assert sample_top(top, built, Full(rows)).ids == [None, int(rows[1].argmax())]


def test_rows_can_be_chosen():
    top = top_of(logits(4, 50), 8)
    assert top.count == 8
    some = top.rows(np.array([2, 0]))
    assert some.ids.tolist() == top.ids[[2, 0]].tolist() and some.values.shape == (2, 8)
    assert top.rows(slice(3)).values.tolist() == top.values[:3].tolist()
