"""A request's body: bounded in size, strict JSON, checked against its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.protocol import strict_json
from llmc.runtime.server.protocol.base import Body

if TYPE_CHECKING:
    from fastapi import Request

B = TypeVar("B", bound=Body)

DISCARDED = 8
"""A body up to this many times the limit is read to its end and thrown away, so that its sender sees the answer."""


async def read_body(request: Request, model: type[B]) -> B:
    """The body as `model`. Raises ApiError 400, 413 or 415, and InputError for what is not strict JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the request's Content-Type must be application/json", code="unsupported_media_type")
    raw = await _read(request, request.app.state.llmc.config.max_body_bytes)
    return model.parse(strict_json.loads(raw))


async def _read(request: Request, limit: int) -> bytes:
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
        else:
            parts.append(part)
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes, this server's limit"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
