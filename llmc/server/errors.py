"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} under the right status.

    400  what the request asks for cannot be done (InputError), or its body cannot be read
    401  no key, or a wrong one          404  no such route, or another model than the one served
    405  another method
    413  the body is too large           415  the body is not declared as JSON
    429  the client has too many connections or requests (with Retry-After)
    500  a fault of this server          503  loading, draining, overloaded (with Retry-After), or the engine stopped

No message holds a stack trace or a path of the server. The answer to an unexpected error says only that the log has it.
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
"""A status for the metrics only: nginx's number for a client that closed its connection."""
_SUBJECT = re.compile(r"[a-z][a-z0-9_]*")


class ApiError(LlmcError):
    """An answer that is an error: its HTTP status, what the error object says, and headers beside it."""

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
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after_s: float, code: str) -> ApiError:
    """A 503 that says when to try again, in whole seconds."""
    return ApiError(
        503, message, kind=SERVER, code=code, headers={"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    )


def api_error(error: BaseException, fields: Mapping[str, Any] | None = None) -> ApiError:
    """What to answer to `error`. An InputError that begins with one of the request's `fields` names it as param."""
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
            return ApiError(500, "the server failed on this request; its log says more", kind=SERVER, code="internal")


def install(app: FastAPI) -> None:
    """Let every error of `app` be answered as above."""

    async def answer(request: Request, error: Exception) -> Response:
        return api_error(error).response

    async def no_such(request: Request, error: Exception) -> Response:
        known = api_error(error)
        what = f"{request.method} {request.url.path[:200]!r}"
        if known.status == 404:
            known = ApiError(404, f"no such route: {what}; /openapi.json lists them", code="unknown_url")
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
    """Answers 500 when `app` raises an unexpected error. If the answer has begun, the connection is closed instead."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
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
