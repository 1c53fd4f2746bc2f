"""Send a generation's response, whole or streamed, while the client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from llmc.server.aside import disconnected, unless_disconnected
from llmc.server.errors import api_error
from llmc.server.generation import Generation
from llmc.server.protocol.chunks import event

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
    request: Request, start: Coroutine[Any, Any, Generation], writer: Writer, streamed: bool | None
) -> Response:
    """Respond to `request`; raises errors of `start` before anything is sent."""
    if streamed:
        generation = await unless_disconnected(request.receive, start)
        return EventStream(writer.stream(generation), generation.cancel)

    async def whole() -> Response:
        return JSONResponse(await writer.whole(await start))

    return await unless_disconnected(request.receive, whole())
