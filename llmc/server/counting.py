"""Counts answers by route and status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from llmc.server.telemetry.metrics import Metrics

UNROUTED = "none"


class CountAnswers:
    """Tells `metrics` of every answer: its route as the router spells it ("none" where it came to none) and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.http(getattr(scope.get("route"), "path", UNROUTED), message["status"])
            await send(message)

        await self._app(scope, receive, counted)
