"""One HTTP/1.1 exchange on a connection of its own, in the few microseconds a piece that a load generator can spend.

The bytes are parsed by httptools (llhttp), and what they say is handed on in the event loop's own callback, with the
time at which they were read: no task is woken for a piece of an answer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Protocol, cast
from urllib.parse import urlsplit

from llmc.errors import InputError
from llmc.platforms import missing

try:
    import httptools
except ImportError:
    raise missing("httptools") from None

ENDPOINT_PATHS = ("/chat/completions", "/completions", "/models")


class ProtocolError(Exception):
    """The answer is not HTTP/1.1."""


class TruncatedError(Exception):
    """The connection was closed before the answer was whole."""


@dataclass(frozen=True)
class Site:
    """Where a server is: `prefix` is what its paths begin with, "" or "/something" without a slash at the end."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Site:
        """The site of http://host:port, with or without /v1 or the path of an endpoint behind it.

        Raises InputError for any other text.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"{url!r} is not a URL: {error}; give one such as http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InputError(f"{url!r} is not the URL of a server; give one such as http://127.0.0.1:8000")
        if parts.username is not None:
            raise InputError("give no user or password in the URL; a key goes in --api-key")
        prefix = parts.path.rstrip("/")
        for path in ENDPOINT_PATHS:
            prefix = prefix.removesuffix(path)
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix.removesuffix("/v1"))

    @property
    def url(self) -> str:
        """What messages call it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.prefix}"

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        """The platform's certificates, for https."""
        return ssl.create_default_context() if self.tls else None


class Receiver(Protocol):
    """Takes an answer as it comes; `now` is time.perf_counter() when the bytes were read."""

    def connected(self, now: float) -> None:
        """The connection stands."""
        ...

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """The status and the headers, their names in lower case."""
        ...

    def body(self, data: bytes, now: float) -> None:
        """The next piece of the body."""
        ...


class _Exchange(asyncio.Protocol):
    def __init__(self, receiver: Receiver, request: bytes) -> None:
        self._receiver = receiver
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._headed = False
        self._now = 0.0
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._receiver.connected(perf_counter())
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._end(cause if isinstance(cause, Exception) else ProtocolError(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if exc is None and self._headed and not framed:
            self._end(None)
        else:
            self._end(exc or TruncatedError())

    # httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._headed = True
            self._receiver.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        self._receiver.body(data, self._now)

    def on_message_complete(self) -> None:
        if self._headed:
            self._end(None)
        else:  # 1xx: the answer itself comes later
            self._headers.clear()

    def _end(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
        if self._transport is not None:
            self._transport.close()


async def exchange(
    site: Site, method: str, path: str, headers: Mapping[str, str], body: bytes, receiver: Receiver
) -> None:
    """Send one request to `site` and hand the answer to `receiver`; returns when it is whole.

    Raises OSError when there is no connection or it breaks, TruncatedError when it ends too soon, ProtocolError for
    what is not HTTP. Cancelled, it closes the connection at once.
    """
    lines = [
        f"{method} {site.prefix}{path} HTTP/1.1", f"host: {site.authority}", "connection: close",
        "accept-encoding: identity", f"content-length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items()),
    ]  # fmt: skip
    request = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
    transport, protocol = await asyncio.get_running_loop().create_connection(
        lambda: _Exchange(receiver, request), site.host, site.port, ssl=site.ssl_context
    )
    try:
        await protocol.done
    finally:
        transport.abort()
