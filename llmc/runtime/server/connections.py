"""HTTP connections that cannot be held open by sending slowly: bounds on top of uvicorn's protocol.

A connection has HEAD_S seconds from its start, or from the first byte of a further request, to send a request's head
of at most HEAD_BYTES, and then BODY_S seconds for the body. Past that it is answered 408 (431 for the size) and closed,
without a word where nothing was asked or the answer has begun. Idle connections between requests are uvicorn's matter
(timeout_keep_alive). Where httptools is not installed, h11 itself answers an oversized head, with 400.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 20.0
BODY_S = 60.0
HEAD_BYTES = 64 << 10

_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large"}

Awaited = Literal["head", "body"] | None


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """uvicorn's protocol (httptools where it is installed, else h11) with bounds on how a request may arrive."""

    head_s = HEAD_S
    body_s = BODY_S
    head_bytes = HEAD_BYTES

    _awaited: Awaited = None
    _timer: asyncio.TimerHandle | None = None
    _received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._await("head")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._await(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, then see what the request still lacks."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        cycle: Any = self.cycle
        if getattr(self, "pipeline", None):  # a further request waits for the answer to the one before
            self._await(None)
        elif cycle is None or cycle.response_complete:
            self._received += len(data)
            self._await("head")
            if self._received > self.head_bytes:
                self._refuse(431, f"the request's head is larger than {self.head_bytes} bytes")
        else:
            self._received = 0
            self._await("body" if cycle.more_body else None)

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

    def _refuse(self, status: int, message: str) -> None:
        awaited, cycle = self._awaited, self.cycle
        self._await(None)
        if self.transport.is_closing():
            return
        if awaited == "body":
            owed = not cycle.response_started
        else:  # nothing is owed to an idle connection, nor to a body whose request was answered before it ended
            owed = self._received > 0 and (cycle is None or not cycle.more_body)
        if owed:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = (
                f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
