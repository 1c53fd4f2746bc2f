"""Streams of a replica that dies, where HTTP is spoken: in each replica behind HAProxy, or in Ray's own proxy."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.errors import EngineDeadError
from llmc.server.errors import api_error
from llmc.server.keeper import Keeper
from llmc.server.protocol.chunks import event
from llmc.server.streaming import EventStream

LOST = event(api_error(EngineDeadError("the replica died in the middle of this answer; send the request again")).body)


class EndsStreams:
    """ASGI, over uvicorn: a stream of events whose replica dies ends with an error event.

    Where this process is that replica, `keeper` writes it. Where it is Ray's proxy, `app` returns without a last piece
    of such a stream, and the event becomes its last.
    """

    def __init__(self, app: ASGIApp, keeper: Keeper) -> None:
        self._app, self._keeper = app, keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and watch streams from their head to before their last byte."""
        streams = False

        async def watched(message: Message) -> None:
            nonlocal streams
            if streams and not message.get("more_body", False):
                streams = False
                watch.close()
            await send(message)
            if message["type"] == "http.response.start" and scope["http_version"] == "1.1":
                streams = _streams(message)
                if streams:
                    connection = send.__self__.transport.get_extra_info("socket").fileno()  # type: ignore[attr-defined]
                    watch.enter_context(self._keeper.watching(connection))

        with ExitStack() as watch:
            await self._app(scope, receive, watched)
            if streams:
                await watched({"type": "http.response.body", "body": LOST})


def _streams(head: Message) -> bool:
    kind = dict(head["headers"]).get(b"content-type", b"")
    return bool(kind.startswith(EventStream.media_type.encode()))
