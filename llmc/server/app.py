"""The application: all routes, behind the API key, with one error format."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.server import errors
from llmc.server.access import HoldServed
from llmc.server.auth import OPEN_PATHS, RequireKey
from llmc.server.clients import BoundRequests
from llmc.server.openapi import document
from llmc.server.protocol.chat import ChatRequest
from llmc.server.protocol.completions import CompletionRequest
from llmc.server.protocol.messages import CountRequest, MessagesRequest
from llmc.server.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from llmc.server.protocol.responses import ResponsesRequest
from llmc.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from llmc.server.routes import (
    admin,
    chat,
    completions,
    dashboard,
    health,
    messages,
    metrics,
    models,
    pooling,
    responses,
    tokenize,
)
from llmc.version import __version__

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

    from llmc.server.state import ServerState
    from llmc.server.telemetry.metrics import Metrics

UNROUTED = "none"


class CountAnswers:
    """Counts every response in `metrics`: its route template ("none" if no route matched) and its status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.http(getattr(scope.get("route"), "path", UNROUTED), message["status"])
            await send(message)

        await self._app(scope, receive, counted)


BODIES = (
    CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountRequest, TokenizeRequest,
    DetokenizeRequest, EmbeddingRequest, RerankRequest, ScoreRequest,
)  # fmt: skip
_OFF: TelemetryConfig = {
    "tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False,
}  # fmt: skip
"""Turns off FastAPI's telemetry: this server reports at /metrics only, and sends nothing anywhere."""


class AllowOrigins(CORSMiddleware):
    """Answers CORS preflights before the API key is checked, because browsers send none with them."""

    def __init__(self, app: ASGIApp, allow_origins: Sequence[str]) -> None:
        super().__init__(app, allow_origins, allow_methods=("*",), allow_headers=("*",), max_age=3600)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return 204 for an allowed request; the reason in plain text otherwise."""
        response = super().preflight_response(request_headers)
        if response.status_code != HTTPStatus.OK:
            return response
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)


ROUTERS = tuple(
    module.router
    for module in (models, completions, chat, responses, messages, tokenize, pooling, health, metrics, dashboard)
)  # fmt: skip


def build_app(state: ServerState) -> FastAPI:
    """Build the ASGI application over `state`, which routes reach as `request.app.state.llmc`.

    Raises InputError for an empty API key.
    """
    app = FastAPI(
        title="llmc", version=__version__, description="OpenAI's API over compiled graphs.",
        openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_OFF,
    )  # fmt: skip
    app.state.llmc = state
    errors.install(app)
    keys, tokens = state.config.api_keys, state.config.admin_tokens
    for router in (*ROUTERS, *([admin.router] if tokens else [])):
        app.include_router(router)
    document(app, BODIES, bool(keys), OPEN_PATHS)
    app.add_middleware(errors.AnswerFaults)
    app.add_middleware(HoldServed)
    app.add_middleware(BoundRequests, clients=state.clients, free=OPEN_PATHS)
    if keys or tokens:
        RequireKey(app, keys, tokens)  # refuses empty keys now; middlewares are built at the first request
        app.add_middleware(RequireKey, keys=keys, admin_tokens=tokens)
    if state.config.allowed_origins:
        app.add_middleware(AllowOrigins, allow_origins=state.config.allowed_origins)
    app.add_middleware(CountAnswers, metrics=state.metrics)
    return app
