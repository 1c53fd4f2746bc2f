"""Read request bodies: bounded, parsed as JSON and validated; long ones outside the event loop."""

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
    """Parse a body with pydantic's reader; the last of duplicate keys counts.

    Raises InputError that says where the JSON is invalid, or nested more than 200 deep.
    """
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
