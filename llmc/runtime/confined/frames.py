"""JSON over a stream socket.

frame = u32 length, little endian; JSON text of that length
"""

from __future__ import annotations

import json
import socket
from typing import Any

HEAD = 4
MAX_FRAME = 256 << 20


def pack(value: Any) -> bytes:
    """The frame of a value."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(HEAD, "little") + text


def length(head: bytes) -> int:
    """Bytes that follow a head. Raises ValueError for more than MAX_FRAME."""
    size = int.from_bytes(head, "little")
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    return size


def unpack(text: bytes) -> Any:
    """The value of a frame's text."""
    return json.loads(text.decode("utf-8", "surrogatepass"))


def read(connection: socket.socket) -> Any:
    """The next value, or None at the end."""
    head = _exactly(connection, HEAD)
    if head is None:
        return None
    text = _exactly(connection, length(head))
    return None if text is None else unpack(text)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
