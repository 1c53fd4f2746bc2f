"""Profiles: exact where they say so, close elsewhere, and in bounded memory however long a trace is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.report.traffic_view import profile_json, profile_text
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.profile import MOST, LengthSketch, Windows, distance, drift, profile
from llmc.buckets.traffic.reader import Trace
from tests.buckets.generators import PROPERTY
from tests.buckets.traffic.files import SAMPLE

LENGTHS = st.lists(st.integers(1, 1 << 31), min_size=1, max_size=100)


def sketch(lengths: list[int], bits: int = 10) -> LengthSketch:
    found = LengthSketch(bits)
    for length in lengths:
        found.add(length)
    return found


@PROPERTY
@given(LENGTHS, st.integers(1, 100))
def test_percentiles_are_within_the_precision(lengths, percent):
    exact = sorted(lengths)[-(-len(lengths) * percent // 100) - 1]
    (found,) = sketch(lengths).percentiles([percent])
    assert found is not None and exact * (1 - 1 / 512) <= found <= max(lengths)
    assert found <= exact or percent == 100 or found == max(lengths)


@PROPERTY
@given(LENGTHS, LENGTHS)
def test_sketches_add_up(one, other):
    merged = sketch(one)
    merged.merge(sketch(other))
    whole = sketch(one + other)
    assert (merged.counts, merged.total, merged.longest) == (whole.counts, whole.total, whole.longest)
    assert merged.mean == pytest.approx(sum(one + other) / len(one + other))


def test_the_distance_of_distributions():
    assert distance(sketch([1, 2]), sketch([1, 2])) == 0
    assert distance(sketch([1, 2]), sketch([3, 4])) == 1
    assert distance(sketch([1, 2, 3, 4]), sketch([1, 2])) == pytest.approx(0.5)
    assert distance(LengthSketch(), sketch([1])) == 0


@PROPERTY
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50))
def test_windows_hold_every_request_whatever_the_times(times):
    windows = Windows()
    for time in sorted(times):
        windows.add(TrafficRequest(time, 5, 2))
    found = windows.found(8)
    assert len(found) <= 8
    assert sum(window.requests for window in found) == len(times)
    for before, after in pairwise(found):
        assert after.start == pytest.approx(before.start + before.seconds)


def test_windows_are_of_bounded_number():
    windows = Windows()
    for second in range(10_000):
        windows.add(TrafficRequest(second, 5, 2))
    assert len(windows.found(1000)) <= MOST


def test_traffic_that_changes_drifts():
    windows = Windows()
    for second in range(64):
        windows.add(TrafficRequest(second, 10 if second < 48 else 1000, 5))
    assert drift(windows.found(8)) == (pytest.approx(0.75), 0)


def test_the_profile_of_real_traffic():
    trace = Trace(SAMPLE)
    found = profile(trace, has_times=True)
    summary = trace.summary()
    assert found.requests == summary.requests == 1500
    assert (found.prompt.total, found.output.total) == (summary.prompt_tokens, summary.output_tokens)
    assert found.prompt.longest == summary.longest_prompt and found.rate == pytest.approx(summary.rate)
    assert found.running is not None and 1 <= found.running.longest <= found.slots
    text = profile_text(found)
    assert "1,500 requests in" in text and "drift: in one part of the time, " in text
    assert profile_json(found)["lengths"]["prompt"]["longest"] == summary.longest_prompt


def test_requests_without_times_have_neither_concurrency_nor_drift():
    found = profile([TrafficRequest(0, 5, 2, 1)] * 3, has_times=False)
    assert (found.duration, found.rate, found.running, found.windows) == (None, None, None, [])
    assert found.cached == pytest.approx(0.2)
    assert "3 requests, which record no times, 20.0% of the prompts' tokens cached" in profile_text(found)
