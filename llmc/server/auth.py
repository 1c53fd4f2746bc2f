"""API keys, checked in one place before routing, so that no route can forget the check."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.errors import InputError
from llmc.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths for an orchestrator, which has no key."""
CHALLENGES = ('Bearer realm="llmc"', 'Basic realm="llmc", charset="UTF-8"')


class RequireKey:
    """Lets through, with one of `keys`: `Authorization: Bearer KEY`, or Basic with the key as password and any user
    name, which is what browsers can send; and OPEN_PATHS without. All else is answered with 401.

    A key is compared by its digest in constant time. Raises InputError for a key that is empty.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys if _checked(key)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one connection."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            response = _refusal().response
            for challenge in CHALLENGES:
                response.headers.append("WWW-Authenticate", challenge)
            await response(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _admits(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        digest = _digest(_credential(given[0]))
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _checked(key: str) -> bool:
    if not key.strip():
        raise InputError("an API key is empty; give a key, or none to ask for none")
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _credential(header: bytes) -> bytes:
    scheme, _, rest = header.partition(b" ")
    rest = rest.strip()
    if scheme.lower() == b"bearer":
        return rest
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def _refusal() -> ApiError:
    return ApiError(
        401, "this server asks for an API key: send it as `Authorization: Bearer KEY`", code="invalid_api_key"
    )
