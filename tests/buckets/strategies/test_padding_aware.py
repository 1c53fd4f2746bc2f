"""The padding-aware rule: what it keeps, what it bounds, and what it refuses."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc.buckets.limits import Limits
from llmc.buckets.strategies import linear, padding_aware
from llmc.buckets.strategies.base import Range
from llmc.buckets.strategies.padding_aware import PaddingAware
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY, small_limits

numbers = st.tuples(
    st.integers(0, 60), st.integers(1, 40), st.integers(0, 600), st.integers(0, 200), st.integers(0, 50)
)


def transcribed(low: int, step: int, high: int, pad_max: int, pad_percent: int) -> list[int]:
    """The walk word for word, with fractions."""
    pad_max = pad_max if pad_max != 0 else high
    kept = {low}
    last = cursor = low
    while cursor <= high:
        if cursor <= step:
            following = max(1, 2 * last)
            if following <= high:
                kept.add(following)
                last = following
        else:
            following = cursor + step
            padding = following - last - 1
            too_much = Fraction(padding, following) > Fraction(pad_percent, 100) or padding > pad_max
            if cursor != last and (too_much or cursor % pad_max == 0):
                kept.add(cursor)
                last = cursor
        cursor = following
    return sorted(kept | {high})


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((0, 8, 64, 64, 0), [0, 1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        ((0, 8, 64, 64, 50), [0, 1, 2, 4, 8, 16, 32, 64]),
        ((16, 16, 128, 32, 25), [16, 32, 48, 64, 80, 96, 128]),
        ((0, 8, 64, 0, 50), [0, 1, 2, 4, 8, 16, 32, 64]),
        ((1, 1, 8, 2, 25), [1, 2, 4, 6, 8]),
        ((1, 1, 64, 0, 50), [1, 2, 6, 14, 30, 62, 64]),
        ((3, 8, 5, 0, 25), [3, 5]),
        ((3, 8, 30, 0, 0), [3, 6, 12, 20, 28, 30]),
        ((20, 8, 20, 0, 25), [20]),
        ((0, 8, 0, 0, 25), [0]),
        ((0, 8, 1, 0, 25), [0, 1]),
    ],
)
def test_examples(bounds, expected):
    assert padding_aware.values(*bounds) == expected


@PROPERTY
@given(numbers)
@example((0, 1, 0, 0, 0))
def test_values_are_the_walk_word_for_word(bounds):
    low, step, extra, pad_max, pad_percent = bounds
    high = low + extra
    found = padding_aware.values(low, step, high, pad_max, pad_percent)
    assert found == transcribed(low, step, high, pad_max, pad_percent)


@PROPERTY
@given(numbers)
def test_values_ascend_from_the_bottom_to_the_top(bounds):
    low, step, extra, pad_max, pad_percent = bounds
    found = padding_aware.values(low, step, low + extra, pad_max, pad_percent)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (low, low + extra)


@PROPERTY
@given(numbers)
def test_no_request_above_the_ramp_is_padded_beyond_both_bounds(bounds):
    low, step, extra, pad_max, pad_percent = bounds
    high = low + extra
    for before, after in pairwise(padding_aware.values(low, step, high, pad_max, pad_percent)):
        padding = after - (before + 1)
        if before <= step:
            assert padding <= max(0, before - 1)
        else:
            assert padding < step or (padding <= (pad_max or high) and 100 * padding <= pad_percent * after)


@PROPERTY
@given(numbers)
def test_every_multiple_of_pad_max_on_the_walk_is_kept(bounds):
    low, step, extra, pad_max, pad_percent = bounds
    pad_max += 1
    found = padding_aware.values(low, step, low + extra, pad_max, pad_percent)
    every = padding_aware.values(low, step, low + extra, pad_max, 0)
    walked = [value for value in every if value > step and value != low + extra]
    assert {value for value in walked if value % pad_max == 0} <= set(found)


@PROPERTY
@given(numbers, st.integers(0, 50))
def test_more_padding_never_makes_more_values(bounds, other):
    low, step, extra, pad_max, pad_percent = bounds
    less, more = sorted((pad_percent, other))
    tight = padding_aware.values(low, step, low + extra, pad_max, less)
    loose = padding_aware.values(low, step, low + extra, pad_max, more)
    assert len(loose) <= len(tight)


@PROPERTY
@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 600), st.integers(0, 100))
def test_zero_percent_is_the_linear_plan_with_its_top(low, more, extra, pad_max):
    low, step = 1 << low, 1 << (low + more)
    high = low + extra
    expected = {*linear.values(low, step, high), high}
    assert padding_aware.values(low, step, high, pad_max, 0) == sorted(expected)


@PROPERTY
@given(st.integers(1, 40), st.integers(1, 4000))
def test_fifty_percent_is_close_to_doubling(step, high):
    found = padding_aware.values(0, step, high, 0, 50)
    assert all(after <= 2 * before + 2 * step for before, after in pairwise(found))
    assert all(after >= 2 * before + 2 - step for before, after in pairwise(found[:-1]) if before > step)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((8, 1, 4, 0, 25), "padding-aware 8,1,4: min is above max"),
        ((1, 0, 4, 0, 25), "step must be at least 1"),
        ((1, 1, 4, -1, 25), "pad_max must not be negative"),
        ((1, 1, 4, 0, 51), "pad_percent 51 must be 0 to 50"),
        ((1, 1, 4, 0, -1), "pad_percent must not be negative"),
        ((1, 1, 4, 0, 2.5), r"pad_percent 2\.5 is not an integer"),
        ((1, 1, 1 << 20, 0, 25), "spans more than"),
    ],
)
def test_numbers_that_are_no_range_are_refused(bounds, message):
    with pytest.raises(InputError, match=message):
        padding_aware.values(*bounds)


@pytest.mark.parametrize("bounds", [Range(1, 2, 8), Range(1, 2, 8, pad_max=3), Range(1, 2, 8, pad_percent=3)])
def test_the_strategy_needs_both_paddings(bounds):
    with pytest.raises(InputError, match="range 1,2,8: the padding-aware rule needs pad_max and pad_percent"):
        PaddingAware().values("prompt_batch", bounds)


def test_defaults_are_the_guides_in_tokens_of_one_sequence():
    defaults = PaddingAware().defaults(Limits(4096, 100, 2048))
    assert defaults["prompt_batch"] == Range(1, 1, 64, pad_max=16, pad_percent=25)
    assert defaults["prompt_query"] == Range(128, 128, 2048, pad_max=512, pad_percent=25)
    assert defaults["prompt_context"] == Range(0, 256, 31 * 128, pad_max=31 * 32, pad_percent=25)
    assert defaults["decode_batch"] == Range(1, 2, 100, pad_max=25, pad_percent=25)
    assert defaults["decode_context"] == Range(128, 128, 4096, pad_max=1024, pad_percent=25)


def test_prompt_contexts_are_zero_where_every_prompt_fits_in_one_query():
    bounds = PaddingAware().defaults(Limits(4096, 8))["prompt_context"]
    assert PaddingAware().values("prompt_context", bounds) == [0]


def test_missing_paddings_follow_the_top_and_given_ones_stay():
    rule, limits = PaddingAware(), Limits(4096)
    assert rule.complete("prompt_batch", Range(1, 1, 9), limits) == Range(1, 1, 9, pad_max=3, pad_percent=25)
    given = Range(1, 1, 9, pad_max=0, pad_percent=0)
    assert rule.complete("prompt_batch", given, limits) == given
    assert rule.complete("prompt_batch", Range(1, 1, 9, "--flag", pad_percent=7), limits).pad_max == 3


@PROPERTY
@given(small_limits())
def test_defaults_reach_their_tops_under_any_limits(limits):
    for dimension, bounds in PaddingAware().defaults(limits).items():
        found = PaddingAware().values(dimension, bounds)
        assert found == sorted(set(found))
        assert (found[0], found[-1]) == (bounds.min, bounds.max)
