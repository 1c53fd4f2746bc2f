"""HTTP connections with bounds, on top of uvicorn's protocol: slow senders, slow readers and large senders cannot hold
one.

From its start, or from the first byte of a further request, a connection has HEAD_S seconds to send a request head of
at most HEAD_BYTES, then BODY_S seconds for the body. After that the server responds 408 (431 for the size) and closes
it. An idle connection, or one whose response has begun, is closed without a response. A client that reads nothing of a
response for SEND_S is cut off. At most PIPELINED requests wait behind an active one; what follows them is not read, and
the connection closes after them. uvicorn handles idle connections between requests (timeout_keep_alive), and clients.py
their number.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llmc.platforms import require_names
from llmc.server.errors import ApiError

if TYPE_CHECKING:
    from llmc.server.clients import Clients

HEAD_S = 20.0
BODY_S = 60.0
SEND_S = 60.0
HEAD_BYTES = 64 << 10
PIPELINED = 16
KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept: longer than common proxies do, so that they close first."""
UVICORN: Mapping[str, Any] = {"ws": "none", "server_header": False, "proxy_headers": False}
"""uvicorn options wherever llmc uses it: no WebSocket, no server header, no trust in proxy headers."""

# uvicorn does not document its protocol, and the bounds below would not work without these
require_names(
    "uvicorn", HttpToolsProtocol, "on_header", "on_headers_complete", "on_message_begin", "send_400_response",
    "cycle", "pipeline",
)  # fmt: skip
require_names(
    "uvicorn", RequestResponseCycle,
    "disconnected", "keep_alive", "message_event", "more_body", "response_complete", "response_started",
)  # fmt: skip

Awaited = Literal["head", "body"] | None


class _EnoughError(Exception):
    """Stops the parser on the received data."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with bounds on how requests arrive."""

    head_s = HEAD_S
    body_s = BODY_S
    send_s = SEND_S
    head_bytes = HEAD_BYTES
    clients: Clients | None = None
    ended: Callable[[], None] = staticmethod(lambda: None)
    """Called when the connection ends."""

    _awaited: Awaited = None
    _timer: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _in_head = False
    _received = 0
    _counted = False
    _deaf = False
    _unanswered: tuple[RequestResponseCycle, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, or refuse and close if there are too many connections."""
        super().connection_made(transport)
        refusal = None if self.clients is None else self.clients.connect(self._address)
        if refusal is None:
            self._counted = True
            self._await("head")
        else:
            self._deaf = True
            self._say(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting, and notify the active and queued requests."""
        self._await(None)
        self.resume_writing()
        if self._counted and self.clients is not None:
            self.clients.leave(self._address)
        for cycle in self._unanswered:  # uvicorn ends only the last request
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self.ended()

    @property
    def _address(self) -> str | None:
        return self.client[0] if self.client else None

    def pause_writing(self) -> None:
        """The client does not read its response; cut it off after SEND_S."""
        super().pause_writing()
        if self._sending is None:
            self._sending = self.loop.call_later(self.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Process bytes, then update what the request still lacks."""
        if self._deaf:
            return
        super().data_received(data)
        if self._deaf or self.transport.is_closing():
            return
        cycle = self.cycle
        if self.pipeline:  # a further request waits for the response to the previous one
            self._await(None)
        elif cycle is None or cycle.response_complete:
            self._received += len(data)
            self._await("head")
            if self._received > self.head_bytes:
                self._refuse_head()
        else:
            self._received = 0
            self._await("body" if cycle.more_body else None)

    def on_message_begin(self) -> None:
        """httptools callback: a request begins."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools callback: a header has arrived.

        Trailers do not join the headers (RFC 9110, 6.5.1): a proxy that checks the head has not seen them.
        """
        if self._in_head:
            super().on_header(name, value)

    @property
    def _too_large(self) -> str:
        return f"the request's head is larger than {self.head_bytes} bytes"

    def _wrong_with_head(self) -> ApiError | None:
        """Return why a head is refused: its size, or a rule for servers (RFC 9112, 2.3 and 3.2)."""
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.head_bytes:
            return ApiError(431, self._too_large)
        version, hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1"):
            return ApiError(505, f"HTTP {version} is not supported; use HTTP/1.1")
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            return ApiError(400, f"the request has {hosts or 'no'} Host headers; it needs one")
        return None

    def on_headers_complete(self) -> None:
        """httptools callback: a head is complete; start its request, or queue it behind the previous one."""
        if (error := self._wrong_with_head()) is not None:
            self._deaf = True
            if not self.pipeline and (self.cycle is None or self.cycle.response_complete):
                self._await(None)
                self._say(error)
            else:
                self._close_after_these()
            raise _EnoughError
        if len(self.pipeline) >= PIPELINED:
            self._deaf = True
            self._close_after_these()
            raise _EnoughError
        super().on_headers_complete()
        self._in_head = False
        self._unanswered = (*(cycle for cycle in self._unanswered if not cycle.response_complete), self.cycle)

    def _close_after_these(self) -> None:
        self.cycle.keep_alive = False
        self._await(None)

    def send_400_response(self, msg: str) -> None:
        """uvicorn callback: the input is invalid; respond, unless a response was sent or has begun."""
        if not self._deaf:
            self._deaf = True
            self._say(ApiError(400, "the request cannot be read as HTTP/1.1"))

    def _await(self, what: Awaited) -> None:
        if what == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._awaited = what
        if what is not None:
            self._timer = self.loop.call_later(self.head_s if what == "head" else self.body_s, self._expired)

    def _expired(self) -> None:
        what, seconds = ("head", self.head_s) if self._awaited == "head" else ("body", self.body_s)
        self._refuse(408, f"the request's {what} did not arrive within {seconds:g} seconds")

    def _refuse_head(self) -> None:
        self._received = max(1, self._received)
        self._refuse(431, self._too_large)

    def _refuse(self, status: int, message: str) -> None:
        awaited, cycle = self._awaited, self.cycle
        self._await(None)
        if self.transport.is_closing():
            return
        if awaited == "body":
            owed = not cycle.response_started
        else:  # no response for an idle connection, nor if the response came before the whole body
            owed = self._received > 0 and (cycle is None or not cycle.more_body)
        if owed:
            self._say(ApiError(status, message))
        else:
            self.transport.close()

    def _say(self, error: ApiError) -> None:
        body = json.dumps(error.body).encode()
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "content-type: application/json",
                 f"content-length: {len(body)}", "connection: close",
                 *(f"{name.lower()}: {value}" for name, value in error.headers.items())]  # fmt: skip
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def bounded_by(clients: Clients) -> type[BoundedProtocol]:
    """Return the protocol class of a server whose connections `clients` counts."""
    return type("CountedProtocol", (BoundedProtocol,), {"clients": clients})
