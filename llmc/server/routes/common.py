"""What routes share: the served model, request bodies, and their part of the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.responses import Response
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json

from llmc.errors import EngineDeadError, InputError
from llmc.server.aside import LARGE, SharedWork, aside
from llmc.server.errors import SERVER, ApiError, unavailable
from llmc.server.protocol.base import Body

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from llmc.server.state import Served, ServerState


LONGEST_RETRY_S = 60.0
_USED = "llmc.used"


class HoldServed:
    """Counts a request among the users of the served model from `served_of` until it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        used: list[Served] = []
        scope[_USED] = used
        try:
            await self._app(scope, receive, send)
        finally:
            for served in used:
                served.users.add(-1)


def state_of(request: Request) -> ServerState:
    """Return the server's state."""
    state: ServerState = request.app.state.llmc
    return state


def served_of(request: Request) -> Served:
    """Return what is served, open until the request is answered. Raises ApiError 503 while or if loading failed."""
    state = state_of(request)
    if state.load_error is not None:
        raise ApiError(503, "the server could not load its model; see its log", kind=SERVER, code="load_failed")
    if state.served is None:
        progress = state.progress
        message = f"the model is loading ({progress.stage}, {progress.done} of {progress.total}); try again later"
        eta = 1.0 if progress.eta_s is None else progress.eta_s
        raise unavailable(message, min(eta, LONGEST_RETRY_S), "loading")
    state.served.users.add(1)
    request.scope[_USED].append(state.served)
    return state.served


def serving(request: Request, model: str | None) -> Served:
    """Return the served model if it or an adapter is called `model` (None: any).

    Raises ApiError 503 while loading or draining, 404 for another model, and EngineDeadError.
    """
    served = served_of(request)
    check_model(served, model)
    if state_of(request).draining:
        raise unavailable("the server is shutting down; send the request to another one", LONGEST_RETRY_S, "draining")
    if served.engine.error is not None:
        raise EngineDeadError("the engine stopped on an error; see the server's log, and start it again")
    return served


def check_model(served: Served, model: str | None) -> None:
    """Raise ApiError 404 if `model` is neither None, the served model, nor one of its adapters."""
    if model is not None and model not in served.names:
        raise ApiError(
            404, f"the model {model[:200]!r} is not served here; this server has {', '.join(map(repr, served.names))}",
            param="model", code="model_not_found",
        )  # fmt: skip


B = TypeVar("B", bound=Body)

MAX_HELD = 128 << 20
"""Bytes of long bodies that the server holds in total while reading; beyond that it refuses requests as overload."""

DISCARDED = 8
"""A body up to this many times the limit is read and discarded, so that its sender sees the error."""


async def read_body(request: Request, model: type[B]) -> B:
    """Read the body as `model`. Raises ApiError 400, 413 or 415, and InputError for invalid JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the request's Content-Type must be application/json", code="unsupported_media_type")
    state = request.app.state.llmc
    held = _Held(state)
    try:
        raw = await _read(request, state.config.max_body_bytes, held)
        size = len(raw) if len(raw) >= LARGE else 0  # parsing a shorter one is faster than starting a thread
        return await aside(request, size, lambda: model.parse(read_json(raw)))
    finally:
        held.release()


def read_json(raw: bytes) -> Any:
    """Parse a body; the last of duplicate keys counts. Raises InputError with the place, or for 200 levels and more."""
    try:
        return from_json(raw, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise InputError(f"the body cannot be read as JSON: {error}") from None


class _Held:
    """One request's share of MAX_HELD; its first LARGE bytes do not count."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._held = 0

    def grow(self, size: int) -> None:
        """Set the body size to `size`. Raises ApiError 503 if other requests hold too much."""
        more = max(0, size - LARGE) - self._held
        if more > 0 and self._state.held_bytes + more > MAX_HELD and self._state.held_bytes > self._held:
            raise unavailable("the server is reading too many long bodies; try again later", 1.0, "overloaded")
        self._state.held_bytes += more
        self._held += more

    def release(self) -> None:
        self._state.held_bytes -= self._held
        self._held = 0


async def _read(request: Request, limit: int, held: _Held) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit * DISCARDED:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit * DISCARDED:
            break
        if size > limit:
            parts.clear()
            held.release()
        else:
            held.grow(size)
            parts.append(part)
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes, this server's limit"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


_REF = "#/components/schemas/{model}"


def reads(model: type[Body]) -> dict[str, Any]:
    """Return `openapi_extra` for a route that reads its body as `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def streams(description: str) -> dict[str, Any]:
    """Describe the streamed form of a 200 response."""
    data = {"type": "string", "description": "A chunk as JSON, an error object as JSON, or [DONE]."}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"description": description, "content": {"text/event-stream": {"schema": event}}}


def document(app: FastAPI, bodies: Iterable[type[Body]], keyed: bool, open_paths: Iterable[str]) -> None:
    """Complete /openapi.json: schemas of `bodies` and, if `keyed`, the key for all but `open_paths`."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            built = plain()
            _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
            components = built.setdefault("components", {})
            components["schemas"] = {**components.get("schemas", {}), **found.get("$defs", {})}
            if keyed:
                components["securitySchemes"] = {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "basic": {"type": "http", "scheme": "basic", "description": "The key as password; any user name."},
                }
                built["security"] = [{"bearer": []}, {"basic": []}]
                for path in open_paths:
                    for operation in built["paths"].get(path, {}).values():
                        operation["security"] = []
            app.openapi_schema = built
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    written: list[bytes] = []
    shared = SharedWork()

    async def openapi_json() -> Response:
        if not written:
            written.append(await shared.get(lambda: json.dumps(openapi()).encode()))
        return Response(written[0], media_type="application/json")

    app.add_api_route("/openapi.json", openapi_json, include_in_schema=False)
