"""The engine requests of one HTTP request, with one numbering for all choices, and their response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fastapi.responses import JSONResponse, Response
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from llmc.runtime.engine.requests import Request, Update
from llmc.runtime.engine.sampling.batch import TokenLogprobs
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.server.aside import disconnected, unless_disconnected
from llmc.server.errors import SERVER, ApiError, api_error, bad_request
from llmc.server.protocol.answers import event

if TYPE_CHECKING:
    from llmc.runtime.engine.async_engine import Stream
    from llmc.server.state import Served, ServerConfig


TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass
class Answer:
    """A finished choice."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.parts)


def check_room(served: Served, config: ServerConfig, prompts: int, params: SamplingParams) -> None:
    """Refuse too many prompts before any work is done.

    Raises ApiError if they could never be admitted together, OverloadedError and EngineDeadError if nothing can be
    admitted now.
    """
    count, most = prompts * params.choices, config.max_queued_requests + served.limits.max_num_seqs
    if count > most:
        raise bad_request(f"the request asks for {count} sequences; this server takes at most {most} at once", "prompt")
    served.generating.check_room()


class Generation:
    """Accepted requests. Choice n·p + i is choice i of prompt p."""

    def __init__(self, streams: Sequence[Stream], prompts: Sequence[Sequence[int]], n: int) -> None:
        self.prompts = prompts
        self.n = n
        self._streams = streams
        self._completion_tokens = 0
        self._cached = [0] * len(prompts)

    @classmethod
    async def start(
        cls, served: Served, request_id: str, prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        priority: int | None = None, adapter: int = 0, headers: Mapping[str, str] | None = None,
    ) -> Generation:  # fmt: skip
        """Submit all of `prompts` to the engine, or none, with adapter number `adapter` (0: none).

        `params` are of all prompts, or of each. `headers` may name a trace. Raises what `AsyncEngine.open` raises.
        """
        ends, streams = served.tokenizer.eos_token_ids, []
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers} if headers else {}
        try:
            for i, ids in enumerate(prompts):
                name = f"{request_id}-{i}" if len(prompts) > 1 else request_id
                request = Request(name, ids, each[i], ends, priority or 0, adapter, trace)
                streams.append(await served.generating.open(request))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return cls(streams, prompts, each[0].n)

    def cancel(self) -> None:
        """Cancel unfinished requests and free their slots."""
        for stream in self._streams:
            stream.cancel()

    @property
    def choices(self) -> int:
        """Number of choices of all prompts."""
        return len(self.prompts) * self.n

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far, in OpenAI's usage format."""
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    async def updates(self) -> AsyncGenerator[list[tuple[int, Update]], None]:
        """Yield updates as (choice, update); call `cancel` if you stop early.

        Raises ApiError for a choice that was cut off, and the engine's EngineDeadError. A choice that fails by itself
        ends with finish_reason "error".
        """
        if len(self._streams) == 1:
            async for updates in self._streams[0]:
                yield self._counted(0, updates)
            return
        news: asyncio.Queue[tuple[int, list[Update] | None]] = asyncio.Queue()

        async def pump(prompt: int, stream: Stream) -> None:
            try:
                async for updates in stream:
                    news.put_nowait((prompt, updates))
            finally:
                news.put_nowait((prompt, None))

        pumps = [asyncio.ensure_future(pump(p, stream)) for p, stream in enumerate(self._streams)]
        try:
            left = len(pumps)
            while left:
                prompt, updates_ = await news.get()
                if updates_ is None:
                    left -= 1
                    await pumps[prompt]
                else:
                    yield self._counted(prompt, updates_)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _counted(self, prompt: int, updates: list[Update]) -> list[tuple[int, Update]]:
        for update in updates:
            if update.finish_reason == "abort":
                raise ApiError(503, "the request was cut off: the server is shutting down", kind=SERVER, code="aborted")
            self._completion_tokens += len(update.token_ids)
            self._cached[prompt] = max(self._cached[prompt], update.cached_tokens)
        return [(prompt * self.n + update.index, update) for update in updates]

    async def answers(self) -> list[Answer]:
        """Return all choices when the last is finished; on an error or cancellation, cancels the rest."""
        found = [Answer() for _ in range(self.choices)]
        try:
            async for updates in self.updates():
                for choice, update in updates:
                    answer = found[choice]
                    answer.parts.append(update.text)
                    answer.token_ids += update.token_ids
                    answer.logprobs += update.logprobs
                    answer.finish_reason = update.finish_reason or answer.finish_reason
                    answer.stop_reason = update.stop_reason
        except BaseException:
            self.cancel()
            raise
        return found


HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(Response):
    """Streams `events`, pieces of the body. An error becomes the last event: {"error": {…}}.

    `release` is always called at the end: the client read everything, left, or the server stops.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], release: Callable[[], None]) -> None:
        self._events = events
        self._release = release
        self.background = None
        self.status_code = 200
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        sender = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            sender.cancel()
            watcher.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)
            await self._events.aclose()
            self._release()

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self._pieces()) as pieces:
                async for data in pieces:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # some ASGI servers signal a disconnected client this way
            return

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            async for data in self._events:
                if data:
                    yield data
        except Exception as e:  # noqa: BLE001 - the response has begun, so only an event can report the error
            yield event(api_error(e).body)


class Writer(Protocol):
    """Builds a route's JSON from a generation."""

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the complete response once the generation has ended."""

    def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield response events as they arrive."""


async def answer(
    request: HttpRequest, start: Coroutine[Any, Any, Generation], writer: Writer, streamed: bool | None
) -> Response:
    """Respond to `request`; raises errors of `start` before anything is sent."""
    if streamed:
        generation = await unless_disconnected(request.receive, start)
        return EventStream(writer.stream(generation), generation.cancel)

    async def whole() -> Response:
        return JSONResponse(await writer.whole(await start))

    return await unless_disconnected(request.receive, whole())
