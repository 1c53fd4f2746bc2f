"""Gzip files that compress nothing, so that the same bytes give the same file wherever it is made.

    file  = header block* end crc32 size
    block = 00 length ~length data                   at most 65,535 bytes; all but the last have as many
    end   = 01 0000 ffff

Deflate's results differ from one zlib to another, and so would the digest of an image. Tools that take layers as gzip
files alone (KServe's mcv) take these. The formats: RFC 1951, 3.2.4, and RFC 1952.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

BLOCK = 65_535
HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
END = b"\x01\x00\x00\xff\xff"


def wrap(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The gzip file of these bytes, in pieces; it depends on the bytes alone, not on how they are cut."""
    checksum = size = 0
    rest = b""
    yield HEADER
    for piece in pieces:
        checksum, size = zlib.crc32(piece, checksum), size + len(piece)
        rest += piece
        cut = len(rest) - len(rest) % BLOCK
        if cut:
            yield b"".join(_block(rest[at : at + BLOCK]) for at in range(0, cut, BLOCK))
            rest = rest[cut:]
    yield (
        (_block(rest) if rest else b"")
        + END
        + checksum.to_bytes(4, "little")
        + (size % (1 << 32)).to_bytes(4, "little")
    )


def _block(data: bytes) -> bytes:
    length = len(data)
    return b"\x00" + length.to_bytes(2, "little") + (length ^ 0xFFFF).to_bytes(2, "little") + data
