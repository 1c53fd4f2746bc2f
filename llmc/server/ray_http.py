"""HTTP as a single server speaks it, where Ray speaks it: in each replica behind HAProxy, or in Ray's own proxy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import uvicorn
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.server.connections import UVICORN, BoundedProtocol
from llmc.server.errors import ApiError, unavailable

NO_ROUTE = ApiError(404, "no such route; /openapi.json lists them", code="unknown_url")
NO_REPLICA = unavailable(
    "no replica answers, or the one that was asked died; send the request again", 1.0, "no_replica"
)
_OBEYED = frozenset(
    {b"x_request_id", b"x_request_timeout_seconds", b"x_request_disconnect_disabled", b"serve_multiplexed_model_id"}
)
_READ = frozenset({b"x_session_id", b"traceparent", b"tracestate"})


class AsAlone:
    """ASGI around Ray's own: headers that Ray obeys do not reach it, nor those that it cannot read; no answer has its
    `x-request-id`; and its errors, in plain text, or no answer at all, become error objects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["headers"] = [header for header in scope["headers"] if _may_pass(*header)]
        begun = replaced = False

        async def as_alone(message: Message) -> None:
            nonlocal begun, replaced
            if message["type"] == "http.response.start":
                begun, status = True, message["status"]
                replaced = status >= 400 and _is_plain(message)
                if replaced:
                    await (NO_ROUTE if status == 404 else NO_REPLICA).response(scope, receive, send)
                message["headers"] = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
            if not replaced:
                await send(message)

        await self._app(scope, receive, as_alone)
        if not begun:
            await NO_REPLICA.response(scope, receive, send)


def _may_pass(name: bytes, value: bytes) -> bool:
    name = name.lower().replace(b"-", b"_")
    return name not in _OBEYED and (name not in _READ or value.isascii())


def _is_plain(head: Message) -> bool:
    return bool(dict(head["headers"]).get(b"content-type", b"").startswith(b"text/plain"))


def middlewares() -> Sequence[Middleware]:
    """For Ray's RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: Ray asks for them right before it starts uvicorn, whose
    options are set here too, since Ray lets nobody set them."""
    uvicorn.Config = partial(uvicorn.Config, http=BoundedProtocol, **UVICORN)  # type: ignore[assignment, misc]
    return [Middleware(AsAlone)]
