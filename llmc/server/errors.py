"""Errors in OpenAI's format, {"error": {"message", "type", "param", "code"}}, and their HTTP status.

    400  the request cannot be served (InputError), or its body cannot be read
    401  no key, or a wrong one          404  no such route, or another model than the served one
    405  another method
    413  the body is too large           415  the Content-Type is not JSON
    429  the client has too many connections or requests (with Retry-After)
    500  an error of this server         503  loading, draining, overloaded (with Retry-After), or the engine stopped

No message holds a stack trace or a path of the server. For an unexpected error it only points to the log.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.errors import EngineDeadError, InputError, LlmcError, OverloadedError

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

_log = logging.getLogger("llmc")

INVALID = "invalid_request_error"
SERVER = "server_error"
CLIENT_GONE = 499
"""Status in the metrics for a client that closed its connection, as in nginx."""
_SUBJECT = re.compile(r"[a-z][a-z0-9_]*")


class ApiError(LlmcError):
    """An error response: HTTP status, error object and additional headers."""

    def __init__(
        self, status: int, message: str, *, kind: str = INVALID, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The complete response."""
        return JSONResponse(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 error."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after_s: float, code: str) -> ApiError:
    """Return a 503 error with Retry-After in whole seconds."""
    return ApiError(
        503, message, kind=SERVER, code=code, headers={"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    )


def api_error(error: BaseException, fields: Mapping[str, Any] | None = None) -> ApiError:
    """Convert `error` to a response; an InputError that begins with one of the request's `fields` sets param."""
    match error:
        case ApiError():
            return error
        case OverloadedError():
            return unavailable(str(error), error.retry_after_s, "overloaded")
        case EngineDeadError():
            return ApiError(503, str(error), kind=SERVER, code="engine_dead")
        case InputError():
            subject = _SUBJECT.match(str(error))
            param = subject[0] if subject and fields and subject[0] in fields else None
            return bad_request(str(error), param)
        case RequestValidationError():
            return bad_request("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()))
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            _log.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
            return ApiError(500, "the server failed on this request; see its log", kind=SERVER, code="internal")


def install(app: FastAPI) -> None:
    """Install handlers for all errors of `app`."""

    async def answer(request: Request, error: Exception) -> Response:
        return api_error(error).response

    async def no_such(request: Request, error: Exception) -> Response:
        known = api_error(error)
        what = f"{request.method} {request.url.path[:200]!r}"
        if known.status == 404:
            known = ApiError(404, f"no such route: {what}; /openapi.json lists all routes", code="unknown_url")
        elif known.status == 405:
            allowed = known.headers.get("Allow", known.headers.get("allow", "another method"))
            message = f"{what} is not allowed here; use {allowed}"
            known = ApiError(405, message, code="method_not_allowed", headers=known.headers)
        return known.response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(HTTPException, no_such)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(LlmcError, answer)
    app.add_exception_handler(RequestValidationError, answer)


class AnswerFaults:
    """Responds 500 if `app` raises an unexpected error, or closes the connection if the response has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as e:
            if started or scope["type"] != "http":
                raise
            await api_error(e).response(scope, receive, send)
