"""A stream whose replica dies ends with an error event, whoever can still write it."""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import json
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from starlette.types import Message

from llmc.server.keeper import Keeper
from llmc.server.ray_stream import EndsStreams
from tests.artifacts.helpers import REPO
from tests.timing import until

SERVER = """
import asyncio, os, socket, sys
import uvicorn
from llmc.server.ray_http import middlewares

async def app(scope, receive, send):
    stream = scope["path"] != "/whole"
    kind = b"text/event-stream; charset=utf-8" if stream else b"text/plain"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": b"data: {}\\n\\n", "more_body": True})
    if scope["path"] == "/full":
        await send({"type": "http.response.body", "body": b"x" * (64 << 20), "more_body": True})
    if scope["path"] != "/ends":
        await asyncio.sleep(600)
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n"})

plain, around = middlewares()
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
app = around.cls(plain.cls(app), *around.args, **around.kwargs)
server = uvicorn.Server(uvicorn.Config(app, http=sys.argv[1], lifespan="off", log_level="critical"))
server.run(sockets=[listener])
"""
ERROR = {
    "message": "the replica died in the middle of this answer; send the request again",
    "type": "server_error", "param": None, "code": "engine_dead",
}  # fmt: skip


class Served:
    """A process that streams."""

    def __init__(self, protocol: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", SERVER, protocol], cwd=REPO, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        self._port = int(self._child.stdout.readline())
        self._child.stdout.close()

    @contextmanager
    def get(self, path: str, version: str = "HTTP/1.1") -> Iterator[http.client.HTTPResponse]:
        """The answer from behind its first event."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection._http_vsn_str = version  # type: ignore[attr-defined]
        connection.request("GET", path)
        with connection.getresponse() as answer:
            assert [answer.readline(), answer.readline()] == [b"data: {}\n", b"\n"]
            yield answer
        connection.close()

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(60)


@pytest.fixture(params=["httptools", "h11"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    pytest.importorskip(request.param)
    server = Served(request.param)
    yield server
    server.kill()


def test_a_kill_in_mid_stream_is_told_by_one_event_and_the_answer_is_whole(served: Served) -> None:
    with served.get("/ends") as ended, served.get("/") as first, served.get("/") as second:
        assert ended.read() == b"data: [DONE]\n\n"
        served.kill()
        for answer in (first, second):
            (told,) = answer.read().split(b"\n\n")[:-1]
            assert json.loads(told.removeprefix(b"data: ")) == {"error": ERROR}


def stands_still(answer: http.client.HTTPResponse) -> bool:
    """Whether something is here that was not read, and no more comes."""

    def unread() -> int:
        return int.from_bytes(fcntl.ioctl(answer.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)

    before = unread()
    time.sleep(0.2)
    return 0 < before == unread()


@pytest.mark.parametrize(("path", "version"), [("/whole", "HTTP/1.1"), ("/full", "HTTP/1.1"), ("/", "HTTP/1.0")])
def test_where_an_event_could_be_taken_for_text_the_answer_breaks_off(served: Served, path: str, version: str) -> None:
    """It is no stream of events, the client has not read what was sent last, or it may not know chunks."""
    with served.get(path, version) as answer:
        if path == "/full":
            until(lambda: stands_still(answer))
        served.kill()
        try:
            rest = answer.read()
        except http.client.IncompleteRead as broken:
            rest = broken.partial
        else:
            assert version == "HTTP/1.0", "it is taken for whole"
    assert b"error" not in rest


def test_a_stream_that_rays_proxy_leaves_off_gets_the_event() -> None:
    """It returns without a last piece, and without an error."""
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    sent: list[Message] = []

    class Cycle:
        class transport:
            @staticmethod
            def get_extra_info(name: str) -> Any:
                return left

        async def send(self, message: Message) -> None:
            sent.append(message)

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        await send(head)
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})

    left, right = socket.socketpair()
    keeper = Keeper(b"killed")
    with left, right:
        with keeper.watching(-1):
            pass  # a client that has gone is not watched, and harms nothing
        asyncio.run(EndsStreams(proxy, keeper)({"type": "http", "http_version": "1.1"}, None, Cycle().send))  # type: ignore[arg-type]
        keeper.close()
        assert keeper._child.returncode == 0
        left.close()
        assert right.recv(100) == b"", "what has ended is not watched any more"
    assert json.loads(sent[-1]["body"].removeprefix(b"data: "))["error"] == ERROR
    assert not sent[-1].get("more_body", False) and len(sent) == 3


def test_without_its_keeper_a_server_serves_on(served: Served) -> None:
    (keeper,) = psutil.Process(served._child.pid).children()
    keeper.kill()
    with served.get("/ends") as answer:
        assert answer.read() == b"data: [DONE]\n\n"
