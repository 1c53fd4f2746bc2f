"""Stopping: accepted requests end, new ones go elsewhere, and the time for it is bounded."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path

import pytest

from llmc.server.events import Draining, Stopped
from tests.server.live import Gate, Live, completion
from tests.timing import until


def test_what_was_accepted_ends_and_what_comes_later_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle) as live:
        live.ready()
        gate.hold()
        calls = [live.call() for _ in range(6)]  # four run, two wait
        until(lambda: live.server.state.served is not None and live.server.state.served.engine.in_flight == 6)
        live.server.stop(signal.SIGTERM)
        said = live.wait(Draining)
        assert (said.signal, said.timeout_s) == ("SIGTERM", 5.0)
        refused = live.complete()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert int(refused.headers["retry-after"]) >= 1
        assert live.get("/health").json == {"status": "ok", "phase": "draining"}
        ready = live.get("/ready")
        assert (ready.status, ready.json["phase"], ready.headers["connection"]) == (503, "draining", "close")
        gate.let()
        answers = [c.answer for c in calls]
        assert {a.status for a in answers} == {200}
        assert {a.json["choices"][0]["finish_reason"] for a in answers} == {"length"}
        live.join()
        assert live.wait(Stopped).cancelled == 0
        assert live.error is None


def test_a_stream_that_runs_is_streamed_to_its_end(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle) as live:
        live.ready()
        whole = live.complete(max_tokens=10).json["choices"][0]["text"]
        gate.hold()
        begun = len(gate.steps)
        call = live.call(stream=True, max_tokens=10)
        gate.let(4)
        gate.wait(begun + 5)
        live.server.stop()
        live.wait(Draining)
        gate.let()
        answer = call.answer
        assert "".join(c["choices"][0]["text"] for c in answer.chunks) == whole
        assert answer.text.endswith("data: [DONE]\n\n")
        live.join()


def test_what_does_not_end_in_time_is_cut_and_says_so(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, shutdown_timeout_s=0.2) as live:
        live.ready()
        begun = len(gate.steps)
        gate.hold()
        calls = [live.call(max_tokens=20, stream=stream) for stream in (True, False)]
        assert live.server.state.served is not None
        engine = live.server.state.served.engine
        until(lambda: engine.in_flight == 2)
        gate.wait(begun + 1)
        requested = len(engine._commands)
        live.server.stop()
        until(lambda: len(engine._commands) == requested + 2)  # the time is up: both are to be cancelled
        gate.let()
        live.join()
        assert live.wait(Stopped).cancelled == 2
        stream, whole = (c.answer for c in calls)
        assert (stream.status, stream.chunks[-1]["error"]["code"]) == (200, "aborted")
        assert (whole.status, whole.json["error"]["code"]) == (503, "aborted")


def test_a_second_signal_does_not_wait(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, shutdown_timeout_s=600.0) as live:
        live.ready()
        begun = len(gate.steps)
        gate.hold()
        call = live.call(max_tokens=20)
        assert live.server.state.served is not None
        engine = live.server.state.served.engine
        gate.wait(begun + 1)
        live.server.stop()
        live.wait(Draining)
        live.server.stop()
        until(lambda: bool(engine._commands))
        gate.let()
        live.join()
        assert live.wait(Stopped).cancelled == 1
        assert (call.answer.status, call.answer.json["error"]["code"]) == (503, "aborted")


def test_an_idle_server_stops_at_once_also_with_idle_connections(bundle: Path) -> None:
    with Live(bundle, shutdown_timeout_s=600.0) as live:
        live.ready()
        with live.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            said = b""
            while not said.endswith(b"}"):
                said += connection.recv(1 << 16)
            live.server.stop()
            live.join()
            assert connection.recv(1) == b""


def test_nothing_of_it_is_left_when_it_stopped(bundle: Path) -> None:
    before = set(threading.enumerate())
    with Live(bundle) as live:
        live.ready()
        assert live.complete().status == 200
        port = live.port
    assert set(threading.enumerate()) <= before

    async def bind() -> None:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", port)
        server.close()
        await server.wait_closed()

    asyncio.run(bind())


def test_a_request_whose_body_comes_while_it_drains_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    gate = Gate(monkeypatch)
    with Live(bundle) as live:
        live.ready()
        data = json.dumps(completion()).encode()
        late = live.connect()
        late.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        late.sendall(b"content-length: %d\r\n\r\n" % len(data) + data[:10])
        gate.hold()
        call = live.call()
        assert live.server.state.served is not None
        engine = live.server.state.served.engine
        until(lambda: engine.in_flight == 1)
        live.server.stop()
        live.wait(Draining)
        late.sendall(data[10:])
        assert late.recv(1 << 16).startswith(b"HTTP/1.1 503")
        late.close()
        gate.let()
        assert call.answer.status == 200
        live.join()
