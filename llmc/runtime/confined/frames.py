"""JSON over a stream socket.

    frame = u32 length of what follows; u32 length of the JSON text; JSON text; parts        (numbers little endian)

The JSON text is [value, [[path, kind, bytes], …]]. Long texts and long lists of integers follow it as parts.
JSON's reader and writer hold the interpreter for 10 ms for a text of 4 MB or a list of 260,000; copying bytes takes
1 ms.

The sender of a frame waits for the answer, so the only other event it must handle is the end of the stream.
"""

from __future__ import annotations

import contextlib
import json
import socket
from array import array
from collections.abc import Mapping
from itertools import islice
from typing import Any

HEAD = 4
MAX_FRAME = 256 << 20
LONG = 1 << 14
"""Characters of a text, or items of a list of integers, from which it becomes a separate part."""
LARGE = 1 << 16
_FIRST, _PART = 64 << 10, 1 << 20
_MOST_LOOKED_AT = 1024

_Part = tuple[list[str | int], str, bytes]


def pack(value: Any) -> bytes:
    """Return the frame of a value."""
    parts: list[_Part] = []
    rest = _without(value, [], parts)
    reported = [rest, [(path, kind, len(data)) for path, kind, data in parts]]
    text = json.dumps(reported, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    size = HEAD + len(text) + sum(len(data) for _, _, data in parts)
    return b"".join([_number(size), _number(len(text)), text, *(data for _, _, data in parts)])


def unpack(data: bytes) -> Any:
    """Return the value of a complete frame."""
    frame = Frame()
    frame.take(data)
    return frame.value


def is_large(value: Any) -> bool:
    """Whether `pack` takes more than about 1 ms: the value has LARGE characters, or more than a thousand values."""
    left, room = [value], LARGE
    for _ in range(_MOST_LOOKED_AT):
        if not left:
            return False
        one = left.pop()
        if isinstance(one, str):
            room -= len(one)
        elif isinstance(one, Mapping | list | tuple):
            room -= len(one)
            if isinstance(one, Mapping):
                left += islice(one, _MOST_LOOKED_AT)
            left += islice(one.values() if isinstance(one, Mapping) else one, _MOST_LOOKED_AT)
        if room < 0:
            return True
    return True


def _without(value: Any, path: list[str | int], parts: list[_Part]) -> Any:
    """Return `value` with null in place of each long item, which is appended to `parts`."""
    if isinstance(value, str):
        if len(value) < LONG:
            return value
        parts.append((path, "text", value.encode("utf-8", "surrogatepass")))
        return None
    if isinstance(value, Mapping):
        return {name: _without(item, [*path, name], parts) for name, item in value.items()}
    if isinstance(value, list | tuple):
        if len(value) >= LONG and set(map(type, value)) == {int}:
            with contextlib.suppress(OverflowError):
                parts.append((path, "integers", array("q", value).tobytes()))
                return None
        return [_without(item, [*path, index], parts) for index, item in enumerate(value)]
    return value


def _number(size: int) -> bytes:
    return size.to_bytes(HEAD, "little")


class Frame:
    """A frame received in pieces: pass at most `wants` bytes to `take` until `wants` is 0."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._end: int | None = None

    @property
    def wants(self) -> int:
        """Bytes to receive next; at first the size of most frames, to need only one call."""
        if self._end is None:
            return _FIRST
        return min(_PART, max(0, self._end - len(self._received)))

    def take(self, part: bytes) -> None:
        """Add received bytes. Raises ValueError for a frame larger than MAX_FRAME, and EOFError for no bytes."""
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
        """The decoded value of a complete frame."""
        with memoryview(self._received) as received:
            start = 2 * HEAD + int.from_bytes(received[HEAD : 2 * HEAD], "little")
            value, parts = json.loads(str(received[2 * HEAD : start], "utf-8", "surrogatepass"))
            holder = [value]
            for path, kind, size in parts:
                data, start = received[start : start + size], start + size
                way: list[Any] = [0, *path]
                container: Any = holder
                for step in way[:-1]:
                    container = container[step]
                container[way[-1]] = str(data, "utf-8", "surrogatepass") if kind == "text" else data.cast("q").tolist()
        return holder[0]


def read(connection: socket.socket) -> Any:
    """Read the next value; None at the end of the stream."""
    frame = Frame()
    with contextlib.suppress(EOFError):
        while wanted := frame.wants:
            frame.take(connection.recv(wanted))
        return frame.value
    return None
