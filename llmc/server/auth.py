"""API key checks in one place before routing, so that no route can forget them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.errors import InputError
from llmc.server.errors import ApiError

ADMIN = "/admin/"
"""Prefix of the paths that need an admin token instead of an API key."""
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths for an orchestrator, which has no key."""
API_KEY = b"x-api-key"
"""Anthropic's header for the key."""
CHALLENGES = ('Bearer realm="llmc"', 'Basic realm="llmc", charset="UTF-8"')


class RequireKey:
    """Requires one of `keys`: as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or as Basic password for browsers.

    OPEN_PATHS need none. Paths below ADMIN require one of `admin_tokens` instead. Without `keys` the other paths are
    open. Requests without a valid key get 401. Keys are compared by digest in constant time. Raises InputError for an
    empty key.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], admin_tokens: Iterable[str] = ()) -> None:
        self._app = app
        self._digests, self._admin = _digests(keys, "an API key"), _digests(admin_tokens, "an admin token")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one connection."""
        admin = bool(self._admin) and scope.get("path", "").startswith(ADMIN)
        known = self._admin if admin else self._digests
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or not known or _admits(scope, known):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            response = _refusal("the admin token" if admin else "an API key", "TOKEN" if admin else "KEY").response
            for challenge in CHALLENGES:
                response.headers.append("WWW-Authenticate", challenge)
            await response(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


def _admits(scope: Scope, digests: Iterable[bytes]) -> bool:
    headers = [(name, value) for name, value in scope["headers"] if name in (b"authorization", API_KEY)]
    if not headers or len(headers) != len({name for name, _ in headers}):
        return False
    found = [_digest(value.strip() if name == API_KEY else _credential(value)) for name, value in headers]
    return sum(hmac.compare_digest(digest, known) for digest in found for known in digests) > 0


def _digests(keys: Iterable[str], what: str) -> list[bytes]:
    found = list(keys)
    if not all(key.strip() for key in found):
        raise InputError(f"{what} is empty; give one, or none at all")
    return [_digest(key.encode("utf-8", "surrogateescape")) for key in found]


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


def _refusal(what: str, shown: str) -> ApiError:
    return ApiError(
        401, f"this server requires {what}: send it as `Authorization: Bearer {shown}`", code="invalid_api_key"
    )
