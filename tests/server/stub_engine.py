"""An engine that says what a test told it to, in place of AsyncEngine; and the application over it, in-process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx

from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.observer import FinishReason
from llmc.runtime.engine.requests import Request, Update
from llmc.runtime.engine.sampling.batch import TokenLogprobs
from llmc.runtime.text.chat import ChatTemplate
from llmc.runtime.text.confined_encoding import ConfinedEncoder
from llmc.server.app import build_app
from llmc.server.state import Served, ServerConfig, ServerState
from llmc.server.telemetry.metrics import Metrics
from llmc.server.telemetry.snapshot import Snapshot


@dataclass
class ScriptedEngine:
    """Answers every choice with `pieces`, one update each; then `finish`, or `fault` is raised."""

    tokenizer: Any
    pieces: Sequence[str] = ("Hel", "lo")
    finish: FinishReason = "stop"
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    fault: BaseException | None = None
    refusals: list[BaseException] = field(default_factory=list)
    """What `open` raises, last first; None, or nothing left: it accepts."""
    endless: bool = False
    error: BaseException | None = None
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    waiting: asyncio.Event | None = None

    def check_room(self) -> None:
        """There is room; `open` refuses."""

    async def open(self, request: Request) -> ScriptedStream:
        if self.refusals and (refusal := self.refusals.pop()) is not None:
            raise refusal
        self.requests.append(request)
        return ScriptedStream(self, request)

    @property
    def params(self) -> Any:
        """Those of the only request."""
        (request,) = self.requests
        return request.params


@dataclass
class ScriptedStream:
    engine: ScriptedEngine
    request: Request

    def cancel(self) -> None:
        self.engine.cancelled.append(self.request.request_id)

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        engine, params = self.engine, self.request.params
        for index, piece in enumerate(engine.pieces):
            last = index == len(engine.pieces) - 1 and engine.fault is None and not engine.endless
            ids = tuple(engine.tokenizer.encode(piece))
            logprobs = tuple(self._logprobs(i, params.logprobs) for i in ids) if params.logprobs is not None else ()
            yield [
                Update(
                    self.request.request_id, choice, piece, ids, logprobs, engine.finish if last else None,
                    engine.stop_reason if last else None, engine.cached_tokens,
                )
                for choice in range(params.n)
            ]  # fmt: skip
            await asyncio.sleep(0)
        if engine.fault is not None:
            raise engine.fault
        if engine.endless:
            if engine.waiting is not None:
                engine.waiting.set()
            await asyncio.Event().wait()

    @staticmethod
    def _logprobs(token_id: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -0.5, 1, tuple((65 + i, -1.0 - i) for i in range(count)))


class Asks:
    """What a server may be asked; `ask` gives the answer, and keywords override the body or the headers."""

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        raise NotImplementedError

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.ask("POST", path, json=body)

    def raw(self, path: str, body: bytes) -> httpx.Response:
        return self.ask("POST", path, content=body, headers={"Content-Type": "application/json"})

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "Hi", **body})

    def chat(self, messages: Any = "Hi", **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": messages, **body})


class Api(Asks):
    """The application over a scripted engine."""

    def __init__(self, bundle: Bundle, template: str | None = "", phase: str = "ready", **config: Any) -> None:
        self.engine = ScriptedEngine(bundle.tokenizer)
        source = bundle.chat_template if template == "" else template
        self.state = ServerState(ServerConfig(**config), Metrics(), Snapshot())
        if phase != "loading":
            encoder = ConfinedEncoder(lambda: bundle.files.read("tokenizer.json"))
            chat = None if source is None else ChatTemplate(source, bundle.special_tokens)
            self.state.served = Served(bundle, self.engine, bundle.tokenizer, encoder, chat, "toy")  # type: ignore[arg-type]
        self.state.draining = phase == "draining"

    @cached_property
    def app(self) -> Any:
        return build_app(self.state)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def requested() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://llmc") as client:
                return await client.request(method, path, **options)

        return asyncio.run(requested())


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for one in lists for item in one]


def events(answer: httpx.Response) -> list[Any]:
    """The data of a stream's events; [DONE] as it is."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    data = [block.removeprefix("data: ") for block in blocks]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of an answer, which has nothing else."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    error: dict[str, Any] = body["error"]
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    return error
