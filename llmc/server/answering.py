"""Sending a generation's answer, whole or as a stream, as long as the client is connected."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from llmc.server.disconnect import unless_disconnected
from llmc.server.generation import Generation
from llmc.server.streaming import EventStream


class Writer(Protocol):
    """Makes a route's JSON of a generation."""

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer when it is over."""

    def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Its events as they come."""


async def answer(
    request: Request, start: Coroutine[Any, Any, Generation], writer: Writer, streamed: bool | None
) -> Response:
    """The answer to `request`; raises what `start` raises before anything is sent."""
    if streamed:
        generation = await unless_disconnected(request.receive, start)
        return EventStream(writer.stream(generation), generation.cancel)

    async def whole() -> Response:
        return JSONResponse(await writer.whole(await start))

    return await unless_disconnected(request.receive, whole())
