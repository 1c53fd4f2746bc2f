"""Connections that send slowly, or too much, are not kept; those that wait for an answer are."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from llmc.server.connections import HEAD_S, PIPELINED, BoundedProtocol
from tests.server.live import Gate, Live, completion
from tests.server.served import Served
from tests.timing import PATIENCE_S, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """To be named before `live`, which opens the device."""
    return Gate(monkeypatch)


@pytest.fixture
def live(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Live:
    """Heads within 0.3 s, bodies within 1 s."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(BoundedProtocol, "head_s", 0.3)
    monkeypatch.setattr(BoundedProtocol, "body_s", 1.0)
    with Live(bundle) as running:
        yield running.ready()


def rest(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    said = b""
    while part := connection.recv(1 << 16):
        said += part
    return said


def one(connection: socket.socket) -> bytes:
    """One answer, a JSON object."""
    said = b""
    while not said.endswith(b"}"):
        said += connection.recv(1 << 16)
    return said


def answered(connection: socket.socket) -> tuple[int, dict[str, object]]:
    head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_connection_that_requests_nothing_is_closed_without_a_word(live: Live) -> None:
    began = time.monotonic()
    with live.connect() as connection:
        assert rest(connection) == b""
    assert 0.2 < time.monotonic() - began < HEAD_S, "which a server has by itself"


def test_a_head_that_trickles_in_is_a_timeout_however_steady_it_is(live: Live) -> None:
    with live.connect() as connection:
        connection.settimeout(0.05)
        said, sent = b"", 0
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        while not said:
            assert (sent := sent + 1) < 100
            try:
                connection.sendall(b"y")
                said = connection.recv(1 << 16)
            except TimeoutError:
                continue
    assert said.startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_a_body_that_does_not_come_is_a_timeout(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        status, error = answered(connection)
    assert status == 408
    assert error["message"] == "the request's body did not arrive within 1 seconds"
    assert error["type"] == "invalid_request_error"


def test_a_chunked_body_that_does_not_end_is_a_timeout(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n")
        assert answered(connection)[0] == 408


def test_a_head_may_not_grow_for_ever(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * (BoundedProtocol.head_bytes + 1))
        status, error = answered(connection)
    assert status == 431
    assert "larger than 65536 bytes" in str(error["message"])


def head_of(size: int, where: str) -> bytes:
    filled = {"long": b"x: " + b"y" * size, "many": b"x: y\r\n" * (size // 6) + b"x: y", "url": b"x: y"}[where]
    path = b"/health" + (b"?" + b"z" * size if where == "url" else b"")
    return b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + filled + b"\r\n\r\n"


@pytest.mark.parametrize("where", ["long", "many", "url"])
def test_a_head_that_comes_whole_is_no_larger_for_it(own: Served, where: str) -> None:
    """All in one piece, so that it was complete before its size was seen."""
    head, _, body = own.say(head_of(90_000, where)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert "larger than 65536 bytes" in json.loads(body)["error"]["message"]
    assert own.say(head_of(60_000, where)).startswith(b"HTTP/1.1 200 ")


def test_so_many_requests_wait_on_a_connection_and_it_ends_with_the_last(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 500)
        said = rest(connection)
    answers = said.split(b"HTTP/1.1 ")[1:]
    assert len(answers) == 1 + PIPELINED
    assert all(answer.startswith(b"200 OK") for answer in answers)
    assert [b"connection: close" in answer for answer in answers] == [False] * PIPELINED + [True]


def test_an_oversized_head_behind_others_ends_the_connection_after_them(live: Live) -> None:
    with live.connect() as connection:
        one = b"GET /health HTTP/1.1\r\nhost: x\r\n"
        connection.sendall((one + b"\r\n") * 3 + one + b"x: " + b"y" * 70_000 + b"\r\n\r\n")
        said = rest(connection)
    assert said.count(b"HTTP/1.1 200") == 3 == said.count(b"HTTP/1.1")


def test_who_leaves_ends_all_that_it_pipelined(gate: Gate, live: Live) -> None:
    """The one that runs is not the last that came."""
    gate.hold()
    before = len(gate.steps)
    data = json.dumps(completion(max_tokens=20)).encode()
    connection = live.connect()
    connection.sendall((HEAD + b"content-length: %d\r\n\r\n" % len(data) + data) * 5)
    gate.wait(before + 1)
    connection.close()
    until(lambda: live.server.state.clients.open == 0)
    engine = live.server.state.served.engine

    def over_a_step_later() -> bool:  # the engine hears of it between two steps
        gate.let(1)
        return engine.in_flight == 0

    until(over_a_step_later)
    gate.let()
    until(lambda: live.stats.running == 0)
    assert len(gate.steps) < before + 20


def test_who_does_not_read_is_cut_off(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "send_s", 0.3)
    live.server.listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # as its connections then have
    with live.connect() as connection:
        data = json.dumps({"prompt": "", "tokens": [65] * 200_000}).encode()
        head = HEAD.replace(b"/v1/completions", b"/detokenize")
        for _ in range(4):
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
        until(lambda: live.server.state.clients.open == 0)


def test_an_answer_may_take_longer_than_any_of_it(gate: Gate, live: Live) -> None:
    gate.hold()
    with live.begin() as connection:
        connection.settimeout(1.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        gate.let()
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_connection_is_kept_between_requests_and_each_gets_the_whole_time(live: Live) -> None:
    data = json.dumps(completion()).encode()
    with live.connect() as connection:
        for _ in range(3):
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(data))
            connection.settimeout(0.4)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(PATIENCE_S)
            connection.sendall(data)
            assert one(connection).startswith(b"HTTP/1.1 200")


def test_the_next_head_on_a_kept_connection_is_bounded_too(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert one(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert answered(connection)[0] == 408


def test_a_request_behind_one_that_runs_may_take_its_time(gate: Gate, live: Live) -> None:
    """Pipelined: the second is not read before the first is answered, and no clock runs for it."""
    gate.hold()
    data = json.dumps(completion()).encode()
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(data) + data
    with live.connect() as connection:
        connection.sendall(whole + whole[:-5])
        connection.settimeout(1.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        gate.let()
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_what_is_sent_behind_an_answer_gets_no_second_one(live: Live) -> None:
    """The key is refused before the body came; the rest of it is not a request."""
    with live.connect() as connection:
        connection.sendall(b"PUT /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        said = connection.recv(1 << 16)
        assert said.startswith(b"HTTP/1.1 405")
        connection.sendall(b"x" * 100_000)
        assert b"HTTP/1.1" not in rest(connection)


@pytest.mark.parametrize("line", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET /h\xc3\xa9 HTTP/1.1", b"BREW / HTTP/1.1"])
def test_nonsense_is_a_bad_request(served: Served, line: bytes) -> None:
    assert served.say(line + b"\r\nhost: x\r\n\r\n").lower().startswith(b"http/1.1 400 bad request\r\n")
    assert served.get("/health").status_code == 200


def test_what_cannot_be_read_is_reported_as_every_error_is(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answered(connection)[1]["message"] == "the request cannot be read as HTTP/1.1"


def test_a_connection_is_not_turned_into_a_websocket(own: Served) -> None:
    upgrade = b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    requested = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\n" + upgrade + b"\r\n"
    assert own.say(requested).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("head", "status", "says"),
    [
        (b"GET /health HTTP/1.1", 400, "no Host headers"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b", 400, "2 Host headers"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nHOST: a", 400, "2 Host headers"),
        (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: a", 400, "2 Host headers"),
        (b"GET /health HTTP/2.0\r\nhost: a", 505, "use HTTP/1.1"),
        (b"GET /health HTTP/1.1\r\nhost: a", 200, ""),
        (b"GET /health HTTP/1.0", 200, ""),
    ],
)  # fmt: skip
def test_a_request_names_one_host_and_a_version_that_is_spoken_here(
    live: Live, head: bytes, status: int, says: str
) -> None:
    """RFC 9112, 3.2: a server must refuse an HTTP/1.1 request without Host, or with more than one."""
    with live.connect() as connection:
        connection.sendall(head + b"\r\nconnection: close\r\n\r\n")
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert says.encode() in answer


@pytest.mark.parametrize("pieces", [1, 2])
def test_what_stands_behind_a_body_is_no_header(bundle: Path, pieces: int) -> None:
    """A proxy in front of the server did not see it; httptools reports it as it reports headers.

    The connection stays: one that closes with bytes unread is reset, and the answer can be lost with it.
    """
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    trailer = b"authorization: Bearer secret\r\nx: " + b"y" * 40_000 + b"\r\nz: " + b"y" * 40_000 + b"\r\n\r\n"
    with Live(bundle, api_keys=("secret",)) as live:
        live.ready()
        for before, status in ((head, 401), (head.replace(b"host", b"authorization: Bearer secret\r\nhost"), 200)):
            with live.connect() as connection:
                whole = before + chunks + trailer
                for at in range(pieces):
                    connection.sendall(whole[at * len(before) : (at + 1) * len(before) if at < pieces - 1 else None])
                assert connection.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 %d" % status
