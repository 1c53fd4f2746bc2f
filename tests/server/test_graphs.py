"""A server on a device that captures graphs: before it is ready, not at all, or between requests."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.options import CaptureOptions
from llmc.errors import InputError, OutOfDeviceMemoryError
from llmc.runtime.executors.fake.executor import FakeGraphDevice
from llmc.runtime.startup.capturing import CaptureChoice
from llmc.server.events import Ready, WarmAside
from tests.server.live import Live, toy_bundle
from tests.timing import PATIENCE_S, until
from tests.toy import greedy

HALF = CaptureChoice(CaptureOptions(graph_reserved_mem=0.5))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_bundle(tmp_path_factory.mktemp("graphs"), device=f"fake:graphs={1 << 20}", verify="none")


def device_of(live: Live) -> FakeGraphDevice:
    assert live.server.state.served is not None
    device = live.server.state.served.engine.engine.core.executor.capabilities.graph_device
    assert isinstance(device, FakeGraphDevice)
    return device


def answers(live: Live, bundle: Path) -> None:
    """What it serves is the reference's text."""
    given = [5, 6, 7]
    answer = live.complete(prompt=given, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    assert [answer.json["choices"][0]["token_ids"]] == greedy(bundle.parent / "toy", [given], 8)


def stopping(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The device's second capture waits for the event."""
    event, honest, begun = threading.Event(), FakeGraphDevice.capture, list[Bucket]()

    def capture(self: FakeGraphDevice, bucket: Bucket) -> int:
        begun.append(bucket)
        if len(begun) == 2:
            assert event.wait(PATIENCE_S)
        return honest(self, bucket)

    monkeypatch.setattr(FakeGraphDevice, "capture", capture)
    return event


def test_graphs_are_captured_before_it_is_ready_and_replayed(bundle: Path) -> None:
    with Live(bundle, capture=HALF) as live:
        ready = live.wait(Ready)
        assert ready.compilations == 0
        assert len(device_of(live)._captured) == ready.warmed
        answers(live, bundle)


def test_ready_says_how_many_are_captured_and_how_long_the_rest_takes(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = stopping(monkeypatch)
    with Live(bundle, capture=HALF) as live:
        until(lambda: live.get("/ready").json.get("stage") == "capture graphs")
        until(lambda: live.get("/ready").json["done"] == 1)
        at = live.get("/ready")
        assert (at.status, at.json["total"]) == (503, 11)
        assert at.json["eta_s"] >= 0
        event.set()
        live.ready()


def test_a_skipped_warm_up_captures_nothing_but_divides_the_memory(bundle: Path) -> None:
    with Live(bundle, warm_up="open", capture=HALF) as live:
        assert live.wait(Ready).warmed == 2
        assert not device_of(live)._captured
        assert device_of(live)._cache
        answers(live, bundle)


def test_graphs_may_be_captured_between_requests(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = stopping(monkeypatch)
    with Live(bundle, warm_up="aside", capture=HALF) as live:
        assert live.wait(Ready).warmed == 2
        until(lambda: live.get("/ready").json.get("warming", {}).get("stage") == "capture graphs")
        event.set()
        assert live.wait(WarmAside).failed == ()
        assert len(device_of(live)._captured) == 11
        answers(live, bundle)


def test_a_device_out_of_memory_in_the_middle_serves_with_what_it_has(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = FakeGraphDevice.capture

    def capture(self: FakeGraphDevice, bucket: Bucket) -> int:
        if bucket.batch == 2:
            raise OutOfDeviceMemoryError("synStatus 26")
        return honest(self, bucket)

    monkeypatch.setattr(FakeGraphDevice, "capture", capture)
    for how in ("all", "aside"):
        with Live(bundle, warm_up=how, capture=HALF) as live:  # type: ignore[arg-type] # a How
            live.wait(WarmAside if how == "aside" else Ready)
            assert 0 < len(device_of(live)._captured) < 11
            answers(live, bundle)
    assert caplog.text.count("the device ran out of memory while capturing prompt[2x8+8]; lower") == 2


def test_a_device_that_breaks_while_it_captures_between_requests_is_named_and_the_server_lives(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(self: FakeGraphDevice, bucket: Bucket) -> int:
        raise RuntimeError("the stream is lost")

    monkeypatch.setattr(FakeGraphDevice, "capture", capture)
    with Live(bundle, warm_up="aside", capture=HALF) as live:
        live.wait(WarmAside)
        assert "capturing graphs ended: RuntimeError: the stream is lost" in caplog.text
        answers(live, bundle)


def test_memory_that_holds_no_sequence_stops_the_start(bundle: Path) -> None:
    with Live(bundle, capture=CaptureChoice(CaptureOptions(gpu_memory_utilization=0.001))) as live:
        until(lambda: live.error is not None)
    assert isinstance(live.error, InputError)
    assert "one sequence of 33 tokens needs 5: raise --gpu-memory-utilization" in str(live.error)


def test_a_flag_for_a_device_that_captures_none_stops_the_start(tmp_path: Path) -> None:
    with Live(toy_bundle(tmp_path), capture=CaptureChoice(CaptureOptions(), ("--graph-prompt-ratio",))) as live:
        until(lambda: live.error is not None)
    assert isinstance(live.error, InputError)
    assert "--graph-prompt-ratio: fake captures no graphs" in str(live.error)
