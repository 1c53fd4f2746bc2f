"""A server that does what a test says: pieces of an answer at exact times, errors, answers that break off."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
        ready = threading.Event()
        loop = asyncio.new_event_loop()

        async def main() -> None:
            self._stop = asyncio.Event()
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await self._stop.wait()
            server.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await asyncio.sleep(0.01)

        thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
        thread.start()
        assert ready.wait(5)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(self._stop.set)
            thread.join(5)
            loop.close()

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


def _json(content: Any) -> Answer:
    return Answer([(0.0, json.dumps(content).encode())], 200, {"Content-Type": "application/json"})


def serving(script: Script | Answer) -> Any:
    """A running server; an answer alone is given to all."""
    return ScriptedServer(script if callable(script) else lambda *_: script).running()
