"""JSON over a stream socket.

frame = u32 length, little endian; JSON text of that length

The sender of a frame waits for the answer. So after a frame, the only news that matters is the end of the stream.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

HEAD = 4
MAX_FRAME = 256 << 20
_FIRST, _PART = 64 << 10, 1 << 20


def pack(value: Any) -> bytes:
    """The frame of a value."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(HEAD, "little") + text


class Frame:
    """A frame that comes in parts: `take` what was received, at most `wants` bytes, until it wants no more."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._end: int | None = None

    @property
    def wants(self) -> int:
        """Bytes to receive next; at first as many as most frames have, so that one call takes all of it."""
        if self._end is None:
            return _FIRST
        return min(_PART, max(0, self._end - len(self._received)))

    def take(self, part: bytes) -> None:
        """Raises ValueError for a frame of more than MAX_FRAME, EOFError where nothing came."""
        if not part:
            raise EOFError
        self._received += part
        if self._end is None and len(self._received) >= HEAD:
            size = int.from_bytes(self._received[:HEAD], "little")
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            self._end = HEAD + size

    @property
    def value(self) -> Any:
        """What it holds, once it is whole."""
        return json.loads(self._received[HEAD : self._end].decode("utf-8", "surrogatepass"))


def read(connection: socket.socket) -> Any:
    """The next value, or None at the end."""
    frame = Frame()
    with contextlib.suppress(EOFError):
        while wanted := frame.wants:
            frame.take(connection.recv(wanted))
        return frame.value
    return None
