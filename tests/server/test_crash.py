"""An engine that stops on an error: requests hear of it, health turns red, and the process stays for its keeper."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from llmc.server.events import Dead
from tests.server.live import Gate, Live
from tests.timing import until


def test_a_crash_ends_what_runs_and_turns_health_red(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llmc.server.lifecycle._LOOK_S", 0.001)
    gate = Gate(monkeypatch)
    with Live(bundle) as live:
        live.ready()
        gate.hold()
        whole, queued = live.call(max_tokens=20), [live.call() for _ in range(5)]
        stream = live.call(stream=True, max_tokens=20)
        assert live.server.state.served is not None
        engine = live.server.state.served.engine
        until(lambda: engine.in_flight == 7)
        with caplog.at_level(logging.ERROR):
            gate.fail(RuntimeError("/secret/path: device lost"))
            for call in (whole, *queued):
                answer = call.answer
                assert answer.status in {500, 503}
                assert answer.json["error"]["type"] == "server_error"
                assert "secret" not in answer.text and "Traceback" not in answer.text
            assert live.wait(Dead).message == "RuntimeError: /secret/path: device lost"
        assert "secret" not in stream.answer.text
        reported = stream.answer.json if stream.answer.status != 200 else stream.answer.chunks[-1]
        assert reported["error"]["type"] == "server_error"

        for path in ("/health", "/ready"):
            answer = live.get(path)
            assert (answer.status, answer.json["phase"]) == (503, "dead")
            assert "start it again" in answer.json["message"] and "secret" not in answer.text
        assert live.get("/v1/health_check").status == 503
        assert live.complete().status == 503
        assert live.get("/metrics").status == 200
        assert len([r for r in caplog.records if "device lost" in r.getMessage()]) == 1
        assert len([e for e in live.events if isinstance(e, Dead)]) == 1
    assert live.error is None


def test_a_stream_that_runs_ends_with_an_error_event(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle) as live:
        live.ready()
        gate.hold()
        begun = len(gate.steps)
        call = live.call(stream=True, max_tokens=20)
        gate.let(4)
        gate.wait(begun + 5)
        gate.fail(RuntimeError("device lost"))
        answer = call.answer
        assert answer.status == 200
        assert answer.chunks[-1]["error"]["type"] == "server_error"
        assert [c for c in answer.chunks[:-1] if "choices" not in c] == []


def test_a_dead_server_stops_at_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, shutdown_timeout_s=600.0) as live:
        live.ready()
        gate.fail(RuntimeError("device lost"))
        assert live.complete().status in {500, 503}
        live.wait(Dead)
        live.server.stop()
        live.join()
        assert live.error is None
