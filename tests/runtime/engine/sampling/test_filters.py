"""Searches on one row: the same as sorting it, ties and odd sizes included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.engine.sampling import filters
from tests.runtime.engine.sampling.reference import logits
from tests.tiers import examples

PROPERTY = examples(150, database=None, derandomize=True)
SIZES = st.sampled_from([1, 2, 63, 257, 2048, 2049, 3000, 6399, 49152])


def values(size, seed, levels):
    """Logits, of a few different values where `levels` is not 0, some of them −inf."""
    row = logits(1, size, seed)[0]
    if levels:
        row = np.round(row * levels) / np.float32(levels)
    row[np.random.default_rng(seed).random(size) < 0.05] = -np.inf
    row[seed % size] = 1.0
    return row


def best_first(row):
    return np.lexsort((np.arange(row.size), -row.astype(np.float64)))


@PROPERTY
@given(size=SIZES, seed=st.integers(0, 999), levels=st.sampled_from([0, 1, 4]), share=st.floats(0, 1))
def test_top_is_the_head_of_the_sorted_row(size, seed, levels, share):
    row = values(size, seed, levels)
    for count in {1, min(size, 50), min(size, 300), min(size, 2000), max(1, int(share * size)), size}:
        assert filters.LogitsRow(row).top(count).tolist() == sorted(best_first(row)[:count].tolist())


@PROPERTY
@given(size=SIZES, seed=st.integers(0, 999), levels=st.sampled_from([0, 2]), bound=st.floats(-9, 12))
def test_above_finds_all(size, seed, levels, bound):
    row = values(size, seed, levels)
    found = filters.LogitsRow(row)
    for at in (bound, float(row.max()), 99.0):
        assert found.above(at).tolist() == np.flatnonzero(row >= np.float32(at)).tolist()
    assert found.largest == row.max()


@pytest.mark.parametrize("index", [0, 2999])
def test_a_nan_is_the_largest(index):
    row = logits(1, 3000)[0]
    row[index] = np.nan
    assert np.isnan(filters.LogitsRow(row).largest)


@PROPERTY
@given(size=SIZES, seed=st.integers(0, 999), temperature=st.floats(1e-3, 10), min_p=st.floats(1e-6, 1))
def test_nothing_that_min_p_keeps_is_below_its_bound(size, seed, temperature, min_p):
    row = values(size, seed, 0) + np.float32(seed)
    weights = filters.weigh(row, row.max(), np.float32(temperature))
    kept = np.flatnonzero(weights >= np.float32(min_p))
    assert row[kept].min() >= filters.min_p_bound(float(row.max()), float(np.float32(temperature)), min_p)


@PROPERTY
@given(size=SIZES, seed=st.integers(0, 999), levels=st.sampled_from([0, 1]), top_p=st.floats(0.01, 0.99))
def test_a_nucleus_is_the_smallest_head_that_reaches_the_share(size, seed, levels, top_p):
    row = values(size, seed, levels)
    weights = filters.weigh(row, row.max(), np.float32(1))
    kept = filters.nucleus(weights, top_p)
    assert kept.tolist() == sorted(best_first(weights)[: kept.size].tolist())
    share = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    assert share[kept].sum() >= top_p - 1e-5
    assert kept.size == 1 or share[best_first(weights)[: kept.size - 1]].sum() <= top_p + 1e-5


@PROPERTY
@given(size=SIZES, seed=st.integers(0, 999), uniform=st.floats(0, 1, exclude_max=True))
def test_a_pick_inverts_the_cumulative_sum(size, seed, uniform):
    weights = filters.weigh(values(size, seed, 0), np.float32(13), np.float32(0.2))
    weights[seed % size] = 1.0
    for at in (uniform, 0.0, 1 - 2**-53):
        index = filters.pick(weights, at)
        cumulative = weights.cumsum(dtype=np.float64) / weights.sum(dtype=np.float64)
        assert weights[index] > 0
        assert cumulative[index] >= at - 1e-6 and (index == 0 or cumulative[index - 1] <= at + 1e-6)


def test_rounding_at_the_end_never_picks_a_token_of_weight_0():
    weights = np.zeros(1000, np.float32)
    weights[[3, 300]] = 1.0
    assert filters.pick(weights, 1.0) == 300  # as where uniform * total rounds up to the total
    assert filters.pick(weights[:100], 1.0) == 3


def test_the_typical_set_may_leave_out_the_most_probable_token():
    """One token of 0.3 and 70 of 0.01: the entropy is near the surprise of the many."""
    weights = np.array([0.3] + [0.01] * 70, np.float32) / np.float32(0.3)
    assert filters.typical(weights, 0.505).tolist() == list(range(1, 52))
    assert filters.typical(weights, 0.99).tolist() == list(range(71))
    assert filters.typical(np.array([1, 0, 0], np.float32), 0.5).tolist() == [0]
