"""A request's body: bounded in size, JSON, checked against its model; a long one beside the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import from_json

from llmc.errors import InputError
from llmc.server.aside import LARGE, aside
from llmc.server.errors import ApiError, unavailable
from llmc.server.protocol.base import Body

if TYPE_CHECKING:
    from fastapi import Request

    from llmc.server.state import ServerState

B = TypeVar("B", bound=Body)

MAX_HELD = 128 << 20
"""Bytes of long bodies that the server holds together while it reads them; beyond, requests are refused as overload."""

DISCARDED = 8
"""A body up to this many times the limit is read to its end and thrown away, so that its sender sees the answer."""


async def read_body(request: Request, model: type[B]) -> B:
    """The body as `model`. Raises ApiError 400, 413 or 415, and InputError for what is not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the request's Content-Type must be application/json", code="unsupported_media_type")
    state = request.app.state.llmc
    held = _Held(state)
    try:
        raw = await _read(request, state.config.max_body_bytes, held)
        size = len(raw) if len(raw) >= LARGE else 0  # shorter ones are read faster than a thread starts
        return await aside(request, size, lambda: model.parse(read_json(raw)))
    finally:
        held.release()


def read_json(raw: bytes) -> Any:
    """The value in a body, by pydantic's reader: of a member that occurs twice the last one counts.

    Raises InputError that says where the body is not JSON, or is nested more than 200 deep.
    """
    try:
        return from_json(raw, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise InputError(f"the body is not JSON that is read here: {error}") from None


class _Held:
    """The part of MAX_HELD that one request uses; its first LARGE bytes do not count."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._held = 0

    def grow(self, size: int) -> None:
        """The body has `size` bytes now. Raises ApiError 503 where others hold too much."""
        more = max(0, size - LARGE) - self._held
        if more > 0 and self._state.held_bytes + more > MAX_HELD and self._state.held_bytes > self._held:
            raise unavailable("the server reads too many long bodies; try again later", 1.0, "overloaded")
        self._state.held_bytes += more
        self._held += more

    def release(self) -> None:
        """Give it back."""
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
