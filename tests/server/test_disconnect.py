"""Clients that leave: their slots are free before the next step, and no gauge remembers them."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path

import pytest

from tests.server.live import Gate, Live, completion
from tests.server.served import KEYS, Served
from tests.timing import until


def leave(connection: socket.socket) -> None:
    """As a client that is killed: the connection is reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def idle(live: Live) -> bool:
    assert live.server.state.served is not None
    engine = live.server.state.served.engine
    return engine.in_flight == 0 and (engine.stats.running, engine.stats.waiting) == (0, 0)


@pytest.mark.parametrize("how", [socket.socket.close, leave], ids=["closed", "reset"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_slot_within_a_step(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, how: object
) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle) as live:
        live.ready()
        gate.hold()
        begun = len(gate.steps)
        connection = live.begin(stream=stream, max_tokens=20)
        gate.let(3)
        gate.wait(begun + 4)  # three steps ran; the fourth, of 20, is at the gate
        how(connection)  # type: ignore[operator]
        assert live.server.state.served is not None
        commands = live.server.state.served.engine._commands
        until(lambda: bool(commands))  # the server noticed; the engine acts when its step is over
        gate.let()
        until(lambda: idle(live))
        assert len(gate.steps) == begun + 4
        assert (live.gauge("num_requests_running"), live.gauge("num_requests_waiting")) == (0, 0)
        assert live.complete().status == 200


def test_a_client_that_leaves_the_queue_gives_its_place_away(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, max_queued_requests=1) as live:
        live.ready()
        assert live.server.state.served is not None
        engine = live.server.state.served.engine
        gate.hold()
        begun = len(gate.steps)
        calls = [live.call() for _ in range(4)]
        until(lambda: engine.in_flight == 4)
        gate.wait(begun + 1)
        queued = live.begin()
        until(lambda: engine.in_flight == 5)
        assert live.complete().status == 503
        requested = len(engine._commands)
        leave(queued)
        until(lambda: len(engine._commands) > requested)
        gate.let(1)
        until(lambda: engine.in_flight == 4)
        last = live.call()
        until(lambda: engine.in_flight == 5)
        gate.let()
        assert {c.answer.status for c in (*calls, last)} == {200}


def test_others_are_served_on_when_one_leaves(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Live(bundle) as live:
        live.ready()
        alone = live.complete(max_tokens=12).json["choices"][0]["text"]
    gate = Gate(monkeypatch)
    with Live(bundle) as live:
        live.ready()
        gate.hold()
        stays = live.call(max_tokens=12)
        gate.wait(3)
        goes = live.begin(max_tokens=20, stream=True, prompt="zyx")
        assert live.server.state.served is not None
        engine = live.server.state.served.engine
        until(lambda: engine.in_flight == 2)
        gate.let(4)
        gate.wait(7)
        leave(goes)
        gate.let()
        assert stays.answer.json["choices"][0]["text"] == alone
        until(lambda: idle(live))


def test_a_client_that_reads_no_more_does_not_hold_its_slot(bundle: Path) -> None:
    """Its tokens wait for it in the connection; the engine goes on."""
    with Live(bundle) as live:
        live.ready()
        connection = live.begin(stream=True, max_tokens=28)
        until(lambda: live.gauge("generation_tokens_total") == 28)
        until(lambda: idle(live))
        connection.close()


def test_half_a_request_is_nothing_to_the_engine(served: Served) -> None:
    before = served.total("prompt_tokens_total")
    data = json.dumps(completion()).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        connection.sendall(b"authorization: Bearer %b\r\n" % KEYS[0].encode())
        connection.sendall(b"content-length: %d\r\n\r\n" % len(data) + data[:10])
        leave(connection)
    assert served.complete(prompt="abcd").status_code == 200
    assert served.total("num_requests_running") == 0
    assert served.total("prompt_tokens_total") == before + 4


def test_who_leaves_in_mid_stream_leaves_nothing_to_do(served: Served) -> None:
    """However many servers are between the client and the engine; on a busy host all may be done before one hears."""

    def rest_is_left_out() -> bool:
        before = served.total("request_success_total", finished_reason="length")
        with served.stream(prompt=["abcd"] * 60, max_tokens=27):
            pass
        until(lambda: served.total("num_requests_running") + served.total("num_requests_waiting") == 0)
        return served.total("request_success_total", finished_reason="length") < before + 60

    assert any(rest_is_left_out() for _ in range(5))
    assert served.complete().status_code == 200
