"""Requests drawn from histograms: always the same, never outside their intervals, and as many as they stand for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.length_histogram import ENDS, MAX_DRAWN, Interval, LengthHistogram, Lengths
from tests.buckets.generators import PROPERTY

BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def histogram(lengths: list[int], bounds: tuple[int, ...] = BOUNDS) -> LengthHistogram:
    ordered = sorted(lengths)
    cumulative = {float(bound): float(sum(length <= bound for length in ordered)) for bound in bounds}
    return LengthHistogram.of({**cumulative, math.inf: float(len(ordered))}, float(sum(ordered)), "x")


@PROPERTY
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=200))
def test_drawn_lengths_fall_into_the_same_intervals(lengths):
    found = histogram(lengths)
    for end in ENDS:
        drawn = found.drawn(len(lengths), end)
        assert drawn == sorted(drawn)
        assert Counter(bisect_left(BOUNDS, length) for length in drawn) == Counter(
            bisect_left(BOUNDS, length) for length in lengths
        )
    assert found.drawn(len(lengths), "low") <= found.drawn(len(lengths), "middle") <= found.drawn(len(lengths), "high")


@PROPERTY
@given(st.lists(st.integers(11, 20), min_size=60, max_size=90))
def test_the_mean_is_that_of_the_histogram(lengths):
    found = histogram(lengths)
    drawn = found.drawn(len(lengths), "middle")
    assert sum(drawn) / len(drawn) == pytest.approx(sum(lengths) / len(lengths), abs=0.8)


def test_the_last_interval_ends_where_the_sum_or_a_limit_says():
    found = LengthHistogram((Interval(1, 10, 4), Interval(11, None, 2)), total=4 * 3 + 2 * 16)
    assert found.drawn(6, "high") == [10] * 4 + [20] * 2
    assert found.drawn(6, "high", limit=15) == [10] * 4 + [15] * 2
    assert LengthHistogram(found.intervals).drawn(6, "high") == [10] * 4 + [22] * 2
    assert LengthHistogram(found.intervals).drawn(6, "high", limit=30) == [10] * 4 + [30] * 2
    assert found.at(50) == Interval(1, 10, 4) and found.at(99) == found.at(100) == Interval(11, None, 2)


@PROPERTY
@given(st.lists(st.tuples(st.integers(1, 6000), st.integers(1, 900)), min_size=1, max_size=80))
def test_requests_have_the_lengths_of_both_histograms(pairs):
    lengths = Lengths(histogram([p for p, _ in pairs]), histogram([o for _, o in pairs]), duration=60.0)
    for end in ENDS:
        drawn = list(lengths.draw(end))
        assert drawn == list(lengths.draw(end))
        assert sorted(request.prompt for request in drawn) == lengths.prompt.drawn(len(pairs), end)
        assert sorted(request.output for request in drawn) == lengths.output.drawn(len(pairs), end)
        assert [request.time for request in drawn] == sorted(request.time for request in drawn)
        assert drawn[-1].time <= 60


def test_prompts_and_outputs_are_paired_as_if_neither_reported_of_the_other():
    lengths = Lengths(histogram([5, 500] * 500), histogram([5, 500] * 500))
    pairs = Counter((request.prompt > 100, request.output > 100) for request in lengths.draw("low"))
    assert all(abs(count - 250) < 25 for count in pairs.values()) and len(pairs) == 4


def test_a_server_that_ran_for_months_is_drawn_in_bounded_number():
    lengths = Lengths(*(LengthHistogram((Interval(1, 10, 10**9), Interval(11, 20, 10**9))),) * 2)
    drawn = list(lengths.draw("high"))
    assert len(drawn) == MAX_DRAWN
    assert Counter(request.prompt for request in drawn) == {10: MAX_DRAWN // 2, 20: MAX_DRAWN // 2}
