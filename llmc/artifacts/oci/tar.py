"""The tar and gzip files of layers: the same content always gives the same bytes.

    archive   = folder* file* zero-block zero-block
    folder    = [records] header(type "5", mode, size 0)
    file      = [records] header(type "0", mode, size) content zeros-up-to-a-block
    records   = header(type "x", name "PaxHeader", size of what follows) record+ zeros-up-to-a-block
    record    = length " path=" name "\\n"            for a name that is not 1 to 100 characters of ASCII
              | length " size=" size "\\n"            for a size that 11 octal digits do not hold, from 8 GiB

    header    = the POSIX ustar header: uid, gid and mtime 0, no owner names, no link; if a record has the name, it is
                "PaxName" here, if a record has the size, 0. The modes of a bundle are 0555 and 0444

The reader builds the expected archive and compares. A link, a device, "..", a repeated name, a sparse file or any other
deviation is a byte that differs. Format: POSIX.1-2017, `pax`, "ustar Interchange Format" and "pax Extended Header".

    gzip file = header block* end crc32 size
    block     = 00 length ~length data               at most 65,535 bytes; all but the last have as many
    end       = 01 0000 ffff

Gzip files are not compressed: deflate's output differs between zlib versions, and so would the digest of an image.
Tools that accept only gzip layers (KServe's mcv) accept these. Formats: RFC 1951, 3.2.4, and RFC 1952.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from llmc.errors import ArtifactError

BLOCK = 512
END = bytes(2 * BLOCK)
PIECE = 1 << 20
MAX_USTAR_SIZE = 0o77777777777
MAX_NAME = 100
LONG_NAME = "PaxName"
FOLDER_MODE = 0o555


class Member(NamedTuple):
    """A file of an archive: its name, size in bytes, and mode."""

    name: str
    size: int
    mode: int = 0o444


def head(member: Member) -> bytes:
    """Return the header blocks of a file."""
    return _head(member.name, member.size, b"0", member.mode)


def folder(name: str, mode: int = FOLDER_MODE) -> bytes:
    """Return the header blocks of a folder, whose name ends with a slash."""
    return _head(name, 0, b"5", mode)


def _head(name: str, size: int, kind: bytes, mode: int) -> bytes:
    records = b""
    if not name.isascii() or len(name) > MAX_NAME:
        records, name = _record(b"path", name.encode()), LONG_NAME
    if size > MAX_USTAR_SIZE:
        records, size = records + _record(b"size", b"%d" % size), 0
    before = _header("PaxHeader", len(records), b"x", 0o444) if records else b""
    return before + records + padding(len(records)) + _header(name, size, kind, mode)


def padding(size: int) -> bytes:
    """Return the zeros that follow a content of `size` bytes."""
    return bytes(-size % BLOCK)


def archive_size(folders: Iterable[str], members: Iterable[Member]) -> int:
    """Return the size in bytes of an archive of these folders and files."""
    files = sum(len(head(member)) + member.size + len(padding(member.size)) for member in members)
    return sum(len(folder(name)) for name in folders) + files + len(END)


def write(
    folders: Iterable[str], contents: Iterable[tuple[Member, Iterable[bytes]]], folder_mode: int = FOLDER_MODE
) -> Iterator[bytes]:
    """Yield an archive in pieces. Raises ArtifactError if a content is longer or shorter than its member says."""
    yield b"".join(folder(name, folder_mode) for name in folders)
    for member, content in contents:
        yield head(member)
        left = member.size
        for piece in content:
            left -= len(piece)
            if left < 0:
                break
            yield piece
        if left:
            raise ArtifactError(
                f"{member.name}: its size changed from {member.size} bytes while it was read; try again"
            )
        yield padding(member.size)
    yield END


class Reader:
    """Reads an archive from anywhere and compares it with what `write` would have written.

    Every method raises ArtifactError at the first byte that differs; `origin` names the archive there. Read all
    members, then call `end`.
    """

    def __init__(self, pieces: Iterable[bytes], origin: str) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")
        self._at = 0
        self._origin = origin

    def folders(self, names: Sequence[str], mode: int = FOLDER_MODE) -> None:
        """Expect these folders, in this order."""
        for name in names:
            self._expect(folder(name, mode), f"folder {name}")

    def file(self, member: Member) -> Iterator[bytes]:
        """Yield the content of exactly this file, in pieces; consume all of them."""
        self._expect(head(member), f"file {member.name} of {member.size} bytes")
        yield from self._take(member.size)
        self._expect(padding(member.size), "zeros after a file")

    def small_files(self, names: Sequence[str], limit: int) -> dict[str, bytes]:
        """Return the files up to the archive's end: some of `names`, in their order, each of at most `limit` bytes."""
        found: dict[str, bytes] = {}
        left = list(names)
        while (start := b"".join(self._take(BLOCK))) != END[:BLOCK]:
            while left and _name(start) != left[0]:
                left.pop(0)
            if not left:
                self._fail(f"{_name(start)!r:.80} is not one of {', '.join(names)}")
            member = Member(left.pop(0), _size(start))
            if start != head(member) or member.size > limit:
                self._fail(f"{member.name} is not a plain file of {limit} bytes at most")
            found[member.name] = b"".join(self._take(member.size))
            self._expect(padding(member.size), "zeros after a file")
        self._expect(END[BLOCK:], "its end")
        self._finish()
        return found

    def end(self) -> None:
        """Expect the end of the archive."""
        self._expect(END, "its end")
        self._finish()

    def _finish(self) -> None:
        if self._rest or any(self._pieces):
            self._fail("more follows after its end")

    def _expect(self, expected: bytes, what: str) -> None:
        at = self._at
        if b"".join(self._take(len(expected))) != expected:
            self._fail(f"{what} was expected at byte {at}, something else is there")

    def _take(self, count: int) -> Iterator[bytes]:
        while count:
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    self._fail(f"it ends early, after {self._at} bytes")
                self._rest = memoryview(piece)
            taken = self._rest[:count]
            self._rest = self._rest[count:]
            self._at += len(taken)
            count -= len(taken)
            yield bytes(taken)

    def _fail(self, problem: str) -> NoReturn:
        raise ArtifactError(f"{self._origin}: not a layer of a bundle ({problem}); push the bundle again")


def _header(name: str, size: int, kind: bytes, mode: int) -> bytes:
    text = name.encode("ascii")
    fields = (
        text.ljust(100, b"\0"), b"%07o\0" % mode, b"%07o\0" % 0, b"%07o\0" % 0, b"%011o\0" % size, b"%011o\0" % 0,
        b" " * 8, kind, bytes(100), b"ustar\x0000", bytes(64), b"%07o\0" % 0, b"%07o\0" % 0, bytes(155 + 12),
    )  # fmt: skip
    header = b"".join(fields)
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]


def _record(name: bytes, value: bytes) -> bytes:
    text = b" %s=%s\n" % (name, value)
    length = len(text)
    while length != len(text) + len(str(length)):
        length = len(text) + len(str(length))
    return b"%d%s" % (length, text)


def _name(header: bytes) -> str:
    return header[:MAX_NAME].rstrip(b"\0").decode("ascii", "replace")


def _size(header: bytes) -> int:
    """Return the size in a header; 0 for an invalid number, which then fails the comparison."""
    digits = header[124:135]
    return int(digits, 8) if digits.isdigit() and not set(digits) & set(b"89") else 0


GZIP_BLOCK = 65_535
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
GZIP_END = b"\x01\x00\x00\xff\xff"


def gzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the gzip file of these bytes; it depends only on the bytes, not on how they are split."""
    checksum = size = 0
    rest = b""
    yield GZIP_HEADER
    for piece in pieces:
        checksum, size = zlib.crc32(piece, checksum), size + len(piece)
        rest += piece
        cut = len(rest) - len(rest) % GZIP_BLOCK
        if cut:
            yield b"".join(_gzip_block(rest[at : at + GZIP_BLOCK]) for at in range(0, cut, GZIP_BLOCK))
            rest = rest[cut:]
    yield (
        (_gzip_block(rest) if rest else b"")
        + GZIP_END
        + checksum.to_bytes(4, "little")
        + (size % (1 << 32)).to_bytes(4, "little")
    )


def _gzip_block(data: bytes) -> bytes:
    length = len(data)
    return b"\x00" + length.to_bytes(2, "little") + (length ^ 0xFFFF).to_bytes(2, "little") + data
