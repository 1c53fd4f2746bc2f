"""Protocol buffers as bytes: reading a message's fields, and writing varints.

Contains only what HLO modules need, and knows no message types. Source: protobuf's encoding guide.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}


def fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value (an integer for varints, else bytes) of each field. Raises IndexError or KeyError."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        kind, size = tag & 7, 0
        if kind == VARINT:
            value, at = _read_varint(message, at)
            yield tag >> 3, kind, value
            continue
        if kind == BYTES:
            size, at = _read_varint(message, at)
        else:
            size = _SIZES[kind]
        if at + size > len(message):
            raise IndexError("a field ends after its message")
        yield tag >> 3, kind, message[at : at + size]
        at += size


def field(number: int, value: int | bytes, kind: int | None = None) -> bytes:
    """Encode a field; the wire type `kind` defaults to varint for an integer and bytes otherwise."""
    kind = kind if kind is not None else VARINT if isinstance(value, int) else BYTES
    tag = varint(number << 3 | kind)
    if isinstance(value, int):
        return tag + varint(value)
    return tag + (varint(len(value)) if kind == BYTES else b"") + value


def varints(data: bytes) -> Iterator[int]:
    """The numbers of a packed field."""
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        yield value


def varint(value: int) -> bytes:
    """Encode a number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def as_bytes(value: int | bytes) -> bytes:
    """A field's value as bytes; raises TypeError for a number."""
    if isinstance(value, int):
        raise TypeError("a number where a message should be")
    return value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
