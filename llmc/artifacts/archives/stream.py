"""An archive as a stream of members, read once from front to back; every byte of it is checked against the grammar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

from llmc.artifacts.archives.compression import MAGIC, decompress
from llmc.artifacts.archives.format import BLOCK, END, Member, fail, padding, read_header
from llmc.errors import ArtifactError

Progress = Callable[[int, int], None]
"""Told of bytes done and bytes in all (0 where that is not known)."""

RAW_PIECE = 64 << 10
RATIO = 1000
"""Limit of the unpacked size, as a multiple of the archive's size; real archives are far below it."""

RATIO_FROM = 64 << 20
"""Unpacked bytes from which the ratio counts."""


class Members:
    """The members of one archive. Everything raises ArtifactError that names the archive, and how far it was read."""

    def __init__(self, file: BinaryIO, name: str, size: int = 0, progress: Progress | None = None) -> None:
        """`size` is that of the file, for `progress`."""
        self.name = name
        self.position = 0
        self._file = file
        self._size = size
        self._progress = progress
        self._consumed = 0
        self._rest = memoryview(b"")
        first = self._read()
        raw = self._raw(first)
        self._pieces = decompress(raw) if first.startswith(MAGIC) else raw

    def next(self) -> Member | None:
        """The next member, whose content must be read before the one after it; None at the archive's end."""
        at = self.position
        block = self._exactly(BLOCK)
        if not any(block):
            if any(self._exactly(len(END) - BLOCK)):
                self.fail(f"damaged at byte {at}: half an end")
            if self._more():
                self.fail(f"something follows its end, at byte {at + len(END)}")
            return None
        try:
            return read_header(block)
        except ValueError as error:
            self.fail(f"{error} (at byte {at})" if at else f"not an archive of `llmc cache export` ({error})")

    def content(self, member: Member, limit: int) -> bytes:
        """All of a small member."""
        if member.size > limit:
            self.fail(f"{member.name} has {member.size} bytes, more than the {limit} it may have")
        return b"".join(self.pieces(member))

    def pieces(self, member: Member) -> Iterator[bytes | memoryview]:
        """The content of a member, in pieces of 1 MiB at most."""
        left = member.size
        while left:
            if not self._rest and not self._more():
                self.fail(f"cut off at byte {self.position}, within {member.name}")
            piece, self._rest = self._rest[:left], self._rest[left:]
            self.position += len(piece)
            left -= len(piece)
            yield piece
        if any(self._exactly(padding(member.size))):
            self.fail(f"damaged at byte {self.position}, behind {member.name}")

    def fail(self, problem: str) -> NoReturn:
        """Raise ArtifactError about this archive."""
        fail(self.name, problem)

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            if not self._rest and not self._more():
                self.fail(f"cut off at byte {self.position}" if self.position or found else "empty")
            piece, self._rest = self._rest[: size - len(found)], self._rest[size - len(found) :]
            found += piece
        self.position += size
        return bytes(found)

    def _more(self) -> bool:
        """Have unread bytes in `_rest`; False at the end."""
        if self._rest:
            return True
        try:
            self._rest = memoryview(next(self._pieces, b""))
        except ValueError as error:
            self.fail(f"{error} (after {self.position} bytes)")
        unpacked = self.position + len(self._rest)
        if unpacked > RATIO_FROM and unpacked > RATIO * self._consumed:
            self.fail(f"unpacks to more than {RATIO} times its size")
        return bool(self._rest)

    def _raw(self, first: bytes) -> Iterator[bytes]:
        piece = first
        while piece:
            self._consumed += len(piece)
            if self._progress is not None:
                self._progress(self._consumed, self._size)
            yield piece
            piece = self._read()

    def _read(self) -> bytes:
        try:
            return self._file.read(RAW_PIECE)
        except OSError as error:
            raise ArtifactError(f"{self.name}: cannot be read ({error.strerror})") from error


@contextmanager
def open_members(source: Path | BinaryIO, progress: Progress | None = None) -> Iterator[Members]:
    """The members of a file, or of a stream that cannot be sought. Raises ArtifactError where it cannot be read."""
    if not isinstance(source, Path):
        yield Members(source, "the archive on standard input", 0, progress)
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise ArtifactError(f"{source}: the archive cannot be read ({error.strerror})") from error
    with file:
        yield Members(file, str(source), os.fstat(file.fileno()).st_size, progress)
