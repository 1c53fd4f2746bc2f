"""What the dashboard is told: a minute second by second, and all since the start."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.engine.observer import Observers
from llmc.server.telemetry.snapshot import Snapshot
from llmc.testing.toy import toy_plan
from tests.server.telemetry.samples import Kept, engine, run, step, summary, toy_bundle
from tests.tiers import examples


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def snapshot(clock: Clock) -> Snapshot:
    return Snapshot(clock)


def test_nothing_yet(snapshot: Snapshot) -> None:
    found = snapshot.to_dict()
    assert found["now"] == {"running": 0, "waiting": 0}
    assert found["window"] == {
        "seconds": 0, "requests_per_s": 0, "prompt_tokens_per_s": 0, "generated_tokens_per_s": 0, "ttft_p50": None,
        "ttft_p95": None, "itl_p50": None, "itl_p95": None,
    }  # fmt: skip
    assert set(map(tuple, found["series"].values())) == {()}
    assert set(found["totals"].values()) == {0}
    assert found["buckets"] == {"window": [], "total": []}
    json.dumps(found, allow_nan=False)


def test_a_second_shows_once_it_is_over(snapshot: Snapshot, clock: Clock) -> None:
    snapshot.emitted([0.5], [])
    assert snapshot.to_dict()["series"]["generated_tokens"] == []
    assert snapshot.to_dict()["totals"]["generated_tokens"] == 1
    clock.now += 1
    assert snapshot.to_dict()["series"]["generated_tokens"] == [1]
    snapshot.emitted([], [0.5, 0.5])
    clock.now += 3
    found = snapshot.to_dict()
    assert found["series"]["generated_tokens"] == [1, 2, 0, 0]
    assert found["window"]["generated_tokens_per_s"] == 0.75
    assert found["totals"]["generated_tokens"] == 3


def test_requests_wait_run_and_end(snapshot: Snapshot, clock: Clock) -> None:
    for name in "abc":
        snapshot.arrived(name, 10)
    snapshot.admitted("a", 0.1, 6)
    snapshot.admitted("b", 0.1, 0)
    clock.now += 1
    assert snapshot.to_dict()["now"] == {"running": 2, "waiting": 1}
    snapshot.finished(summary("a"))
    snapshot.finished(summary("c", finish_reasons=("abort",), queue_s=None))
    clock.now += 2
    found = snapshot.to_dict()
    assert found["now"] == {"running": 1, "waiting": 0}
    assert found["series"]["running"] == [2, 1, 1]
    assert found["series"]["waiting"] == [1, 0, 0]
    assert found["series"]["requests"] == [0, 2, 0]
    totals = found["totals"]
    assert (totals["arrived"], totals["finished"], totals["cached_tokens"]) == (3, 2, 6)


def test_use_by_bucket_in_the_last_minute_and_in_all(snapshot: Snapshot, clock: Clock) -> None:
    snapshot.bind(toy_plan())
    snapshot.stepped(step("prompt", 1, 16, 0, live_rows=1, live_tokens=9, padding_tokens=7, miss=True))
    clock.now += 30
    snapshot.stepped(step(context=16))
    snapshot.stepped(step(context=16))
    snapshot.stepped(step(batch=3, context=17, padding_tokens=0))
    clock.now += 45
    found = snapshot.to_dict()
    decode = [["decode", 4, 1, 16, 2, 6, 6, 2, 0.02], ["decode", 4, 1, 32, 1, 3, 3, 0, 0.01]]
    assert found["buckets"]["window"] == decode
    assert found["buckets"]["total"] == [*decode, ["prompt", 1, 16, 0, 1, 1, 9, 7, 0.01]]
    assert found["totals"]["prompt_tokens"] == 9
    assert found["totals"]["steps"] == 4
    assert found["totals"]["misses"] == 1
    snapshot.stepped(step(context=16))
    assert snapshot.to_dict()["buckets"]["total"][0][4] == 3


def test_the_window_is_a_minute(snapshot: Snapshot, clock: Clock) -> None:
    for second in range(100):
        snapshot.emitted([], [0.001] * second)
        clock.now += 1
    found = snapshot.to_dict()
    assert found["series"]["generated_tokens"] == list(range(40, 100))
    assert found["window"]["seconds"] == 60
    clock.now += 1e6
    found = snapshot.to_dict()
    assert found["series"]["generated_tokens"] == [0] * 60
    assert found["totals"]["generated_tokens"] == sum(range(100))


def test_latencies_by_quantile(snapshot: Snapshot, clock: Clock) -> None:
    snapshot.emitted([1.0] * 10 + [30.0], [0.001] * 95 + [2.0] * 5)
    clock.now += 1
    window = snapshot.to_dict()["window"]
    assert window["ttft_p50"] == pytest.approx(1.0, rel=0.025)
    assert window["ttft_p95"] == pytest.approx(30.0, rel=0.025)
    assert window["itl_p50"] == pytest.approx(0.001, rel=0.025)
    assert window["itl_p95"] == pytest.approx(0.001, rel=0.025)


@given(st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=200))
@examples(50, derandomize=True)
def test_a_quantile_is_within_2_percent_of_a_value_of_its_rank(values: list[float]) -> None:
    clock = Clock()
    snapshot = Snapshot(clock)
    snapshot.emitted(values, [])
    clock.now += 1
    window = snapshot.to_dict()["window"]
    for name, part in (("ttft_p50", 0.5), ("ttft_p95", 0.95)):
        exact = sorted(values)[max(0, -int(-part * len(values) // 1) - 1)]
        assert window[name] == pytest.approx(exact, rel=0.026)


def test_times_of_nothing_at_all_are_counted(snapshot: Snapshot, clock: Clock) -> None:
    snapshot.emitted([0.0], [-1e-9])
    clock.now += 1
    assert snapshot.to_dict()["window"]["ttft_p50"] == pytest.approx(1e-6, rel=0.05)


def test_a_reader_beside_the_engine(snapshot: Snapshot, clock: Clock) -> None:
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            snapshot.arrived(str(number), 1)
            snapshot.admitted(str(number), 0.0, 0)
            snapshot.stepped(step(context=16 + number % 50))
            snapshot.finished(summary(str(number)))
            clock.now += 0.01

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(200):
            found = snapshot.to_dict()
            assert 0 <= found["now"]["running"] <= 1
            assert 0 <= found["totals"]["arrived"] - found["totals"]["steps"] <= 1
    finally:
        stop.set()
        thread.join()


def test_a_real_run(tmp_path) -> None:
    kept, snapshot = Kept(), Snapshot()
    bundle = toy_bundle(tmp_path)
    snapshot.bind(bundle.plan)
    run(engine(bundle, Observers([kept, snapshot])), ["one", "another", "a third one", "four", "5"], cancelled=["3"])
    found = snapshot.to_dict()
    assert found["now"] == {"running": 0, "waiting": 0}
    assert found["totals"]["finished"] == 5
    assert found["totals"]["steps"] == len(kept.steps)
    assert found["totals"]["prompt_tokens"] == sum(s.live_tokens for s in kept.steps if s.phase == "prompt")
    assert found["totals"]["generated_tokens"] == sum(s.output_tokens for s in kept.summaries)
    rows = {(row[0], f"{row[1]}x{row[2]}+{row[3]}"): row[5] for row in found["buckets"]["total"]}
    used = {(s.phase, s.bucket) for s in kept.steps}
    assert rows == {key: sum(s.live_rows for s in kept.steps if (s.phase, s.bucket) == key) for key in used}
