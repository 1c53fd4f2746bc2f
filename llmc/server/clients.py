"""Who may send requests: API keys, and bounds on connections and on each client's active requests.

A client is an IPv4 address or the /64 network of an IPv6 address of the connection. X-Forwarded-For is not trusted, so
all clients behind a proxy count as one. Unix sockets have no address and are only bounded in total.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.errors import InputError
from llmc.server.errors import SERVER, ApiError, unavailable

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


RETRY_S = 1.0
NETWORK_BITS = 64


class Clients:
    """Counts and their bounds; 0 is no bound."""

    def __init__(self, max_connections: int, max_connections_each: int, max_requests_each: int) -> None:
        self._most, self._most_each, self._most_requests = max_connections, max_connections_each, max_requests_each
        self._open = 0
        self._connections: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Number of open connections."""
        return self._open

    def connect(self, address: str | None) -> ApiError | None:
        """Count a connection until `leave`, or return its refusal if there are too many."""
        client = client_of(address)
        if self._most and self._open >= self._most:
            return unavailable(f"{self._open} connections are open, this server's limit", RETRY_S, "overloaded")
        if client and self._most_each and self._connections[client] >= self._most_each:
            return _too_many(f"{self._connections[client]} connections of this client are open", self._most_each)
        self._open += 1
        _add(self._connections, client, 1)
        return None

    def leave(self, address: str | None) -> None:
        """End a counted connection."""
        self._open -= 1
        _add(self._connections, client_of(address), -1)

    def begin(self, address: str | None) -> Callable[[], None]:
        """Count a request; call the result to end it. Raises ApiError if its client has too many."""
        client = client_of(address)
        if client and self._most_requests and self._requests[client] >= self._most_requests:
            raise _too_many(f"{self._requests[client]} requests of this client are being answered", self._most_requests)
        _add(self._requests, client, 1)
        return lambda: _add(self._requests, client, -1)


class BoundRequests:
    """Refuses requests beyond a client's bound with 429; `free` paths do not count."""

    def __init__(self, app: ASGIApp, clients: Clients, free: frozenset[str]) -> None:
        self._app, self._clients, self._free = app, clients, free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http" or scope["path"] in self._free:
            await self._app(scope, receive, send)
            return
        peer = scope.get("client")
        try:
            end = self._clients.begin(peer[0] if peer else None)
        except ApiError as e:
            await e.response(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            end()


def client_of(address: str | None) -> str:
    """Return the client of an address; "" for no address."""
    if not address:
        return ""
    try:
        found: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is None:
            return f"{int(found) >> NETWORK_BITS:x}::/{NETWORK_BITS}"
        found = found.ipv4_mapped
    return str(found)


def _add(counts: Counter[str], client: str, number: int) -> None:
    counts[client] += number
    if not counts[client]:
        del counts[client]


def _too_many(what: str, most: int) -> ApiError:
    message = f"{what}; at most {most} are allowed: wait for some to end"
    return ApiError(429, message, kind=SERVER, code="too_many_requests", headers={"Retry-After": f"{RETRY_S:g}"})
