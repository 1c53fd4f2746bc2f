"""Gzip files without compression, so that the same bytes give the same file everywhere.

    file  = header block* end crc32 size
    block = 00 length ~length data                   at most 65,535 bytes; all but the last have as many
    end   = 01 0000 ffff

Deflate's output differs between zlib versions, and so would the digest of an image. Tools that accept only gzip layers
(KServe's mcv) accept these. Formats: RFC 1951, 3.2.4, and RFC 1952.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

BLOCK = 65_535
HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
END = b"\x01\x00\x00\xff\xff"


def wrap(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the gzip file of these bytes; it depends only on the bytes, not on how they are split."""
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
