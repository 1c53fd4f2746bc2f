"""Recordings made of others keep every length, and the order of time."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.recording import anonymised, chosen, merged, sampled, write
from tests.buckets.generators import PROPERTY

LENGTH = st.integers(1, 5000)
REQUESTS = st.lists(
    st.tuples(st.floats(0, 1000), LENGTH, LENGTH).map(lambda one: TrafficRequest(round(one[0], 3), one[1], one[2])),
    min_size=1,
    max_size=40,
).map(lambda requests: sorted(requests, key=lambda request: request.time))


def trace(folder: Path, name: str, requests: list[TrafficRequest]) -> Trace:
    write(folder / name, requests, start=1.7e9)
    return Trace(folder / name)


def lengths(requests: list[TrafficRequest]) -> list[tuple[int, int]]:
    return sorted((request.prompt, request.output) for request in requests)


@PROPERTY
@given(REQUESTS, REQUESTS)
def test_merged_requests_are_all_there_and_in_order(tmp_path_factory, one, other):
    folder = tmp_path_factory.mktemp("m")
    for align in ("recorded", "start", "after"):
        found = merged([trace(folder, "a.jsonl", one), trace(folder, "b.jsonl", other)], align)
        requests = list(found.requests)
        assert lengths(requests) == lengths(one + other)
        assert [request.time for request in requests] == sorted(request.time for request in requests)
        if align == "recorded":
            assert abs(found.start - 1.7e9 - min(one[0].time, other[0].time)) < 1e-5


@PROPERTY
@given(REQUESTS, st.data())
def test_so_many_are_chosen_in_order(requests, data):
    number = data.draw(st.integers(1, len(requests)))
    found = list(chosen(requests, number, len(requests), seed=3))
    assert len(found) == number
    locations = iter(requests)
    assert all(request in locations for request in found)


def test_every_request_is_as_likely_as_any_other():
    requests = [TrafficRequest(i, i + 1, 1) for i in range(10)]
    counts = [0] * 10
    for seed in range(2000):
        for request in chosen(requests, 3, 10, seed):
            counts[request.prompt - 1] += 1
    assert all(500 < count < 700 for count in counts)
    assert 400 < sum(len(list(sampled(requests, 0.25, seed))) for seed in range(200)) < 600


@PROPERTY
@given(REQUESTS, st.integers(1, 512), st.floats(0, 500), st.integers(0, 9))
def test_anonymised_requests_are_at_least_as_long_and_near_in_time(requests, unit, jitter, seed):
    found = list(anonymised(requests, round_to=unit, jitter=jitter, seed=seed))
    assert [request.time for request in found] == sorted(request.time for request in found)
    rounded = [(-(-p // unit) * unit, -(-o // unit) * unit) for p, o in lengths(requests)]
    assert lengths(found) == sorted(rounded)
    for before, after in zip(requests, found, strict=True):
        assert abs(before.time - after.time) <= jitter + 1e-6


def test_times_are_held_back_in_bounded_number(monkeypatch):
    monkeypatch.setattr("llmc.buckets.traffic.recording.MAX_JITTERED", 5)
    requests = [TrafficRequest(i / 10, i + 1, 1) for i in range(100)]
    found = list(anonymised(requests, jitter=50.0, seed=1))
    assert lengths(found) == lengths(requests)
    assert [request.time for request in found] == sorted(request.time for request in found)
