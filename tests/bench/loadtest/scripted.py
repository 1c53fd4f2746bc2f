"""A server that does what a test says: pieces of an answer at exact times, errors, answers that break off."""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmc.bench.loadtest import client, http, run
from tests.timing import PATIENCE_S

MODEL = "scripted"
DONE = b"data: [DONE]\n\n"


@dataclass
class Answer:
    """`pieces` are (seconds from the request, bytes); without `whole` the connection is closed before the body ends."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream"})
    whole: bool = True
    raw: bytes | None = None
    chunked: bool = True


Script = Callable[[int, dict[str, Any]], Answer]


def chunk(text: str = " word", finish: str | None = None, chat: bool = False) -> bytes:
    """One event of an answer."""
    content: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    return b"data: " + json.dumps({"choices": [{"index": 0, **content, "finish_reason": finish}]}).encode() + b"\n\n"


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def stream(
    first: float = 0.0, gap: float = 0.0, count: int = 2, *, prompt: int | None = 8, output: int | None = None,
    chat: bool = False, finish: str | None = "length", done: bool = True,
) -> Answer:  # fmt: skip
    """`count` pieces, the first after `first` seconds and then one each `gap`; `prompt` None: no usage."""
    pieces = [(first + i * gap, chunk(f" w{i}", finish if i == count - 1 else None, chat)) for i in range(count)]
    last = pieces[-1][0] if pieces else first
    if prompt is not None:
        pieces.append((last, usage(prompt, count if output is None else output)))
    if done:
        pieces.append((last, DONE))
    return Answer(pieces)


def error(status: int, message: str, **headers: str) -> Answer:
    body = json.dumps({"error": {"message": message, "type": "t", "code": None, "param": None}}).encode()
    return Answer([(0.0, body)], status, {"Content-Type": "application/json", **headers})


class ScriptedServer:
    """`script` answers each request of the run, by its place from 0; `words` counts a prompt for the calibration.

    Requests for one token are the calibration's; `requests` are the bodies of the others, `headers` their headers.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.words: Callable[[str], int] | None = lambda prompt: len(prompt.split())
        self.others: dict[str, Answer] = {"/v1/models": _json({"data": [{"id": MODEL}, {"id": "second"}]})}
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.calibrations = 0
        self.open = self.peak = 0
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()

        async def main() -> None:
            serving = asyncio.create_task(self._serve(listening))
            await stop.wait()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await asyncio.sleep(0.01)
            assert serving.cancelled()

        with self._listening() as listening:
            thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
            thread.start()
            try:
                yield self
            finally:
                loop.call_soon_threadsafe(stop.set)
                thread.join(PATIENCE_S)
                loop.close()

    @contextmanager
    def running_in_virtual_time(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
        """In the event loop of the load test, whose clock and whose client's clock are virtual."""
        loop = VirtualLoop()
        for module in (client, http, run):
            monkeypatch.setattr(module, "perf_counter", loop.time)
        monkeypatch.setattr(run, "_loop_factory", lambda: lambda: loop)
        with self._listening() as listening:
            loop.create_task(self._serve(listening))
            yield self

    @contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            yield listening

    async def _serve(self, listening: socket.socket) -> None:
        async with await asyncio.start_server(self._connection, sock=listening) as server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *rest = head.split("\r\n")
            headers = {k.lower(): v.strip() for k, v in (h.split(":", 1) for h in rest if h)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            answer = self._choose(line.split()[1], headers, json.loads(body) if body else {})
            await self._send(writer, answer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.open -= 1

    def _choose(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Answer:
        if path in self.others:
            return self.others[path]
        if "max_tokens" not in body:
            return error(404, f"no route {path}")
        if body["max_tokens"] == 1:
            self.calibrations += 1
            prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
            return stream(count=1, prompt=None if self.words is None else self.words(prompt))
        self.requests.append(body)
        self.headers.append(headers)
        return self.script(len(self.requests) - 1, body)

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if answer.raw is not None:
            writer.write(answer.raw)
            return
        head = [f"HTTP/1.1 {answer.status} Whatever", *(f"{k}: {v}" for k, v in answer.headers.items())]
        if answer.chunked:
            head.append("Transfer-Encoding: chunked")
        writer.write("\r\n".join([*head, "", ""]).encode())
        for at, data in answer.pieces:
            left = began + at - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if answer.chunked else data)
        if answer.whole and answer.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on only while nothing is left to do, and then at once to the next timer.

    What sleeps takes no time, and times are exact, however busy the machine is.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout and min(timeout, 0.02))  # the kernel may still carry bytes over
        if timeout and not found:
            self._loop.pass_time(timeout)
        return found


def _json(content: Any) -> Answer:
    return Answer([(0.0, json.dumps(content).encode())], 200, {"Content-Type": "application/json"})


def serving(script: Script | Answer, virtual: pytest.MonkeyPatch | None = None) -> Any:
    """A running server, with `virtual` in virtual time; an answer alone is given to all."""
    server = ScriptedServer(script if callable(script) else lambda *_: script)
    return server.running() if virtual is None else server.running_in_virtual_time(virtual)
