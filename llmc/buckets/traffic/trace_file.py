"""The lines of a trace file, plain or compressed: streamed, checked, and the same on every pass."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from llmc.errors import InputError

Progress = Callable[[int], None]
"""Called with the bytes of the stored file read so far."""

CHUNK_BYTES = 1 << 18
"""Bytes read and decoded at a time; streaming a trace takes a small multiple of it in memory."""

MAX_LINE_BYTES = 1 << 24
"""Longest line, 16 MiB: a request with a prompt of a million tokens written out fits, a file on one line does not."""

_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"


class TraceFile:
    """A trace file at `path`; `size` is its bytes as stored, `compressed` whether they are gzip (name or content).

    Raises InputError, naming the file, when it is absent, not a regular file, or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode):
                kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise InputError(f"{self.path}: is {kind}; give a trace file")
            with self.path.open("rb") as file:
                magic = file.read(len(_GZIP_MAGIC))
        except (OSError, ValueError) as error:
            _unreadable(self.path, error)
        self.size = status.st_size
        self.compressed = magic == _GZIP_MAGIC or self.path.suffix.lower() == ".gz"

    def start(self, size: int) -> tuple[str, bool]:
        """Return the decompressed text of the first `size` bytes, and whether that is all; replaces invalid UTF-8."""
        text = b""
        for chunk, _ in self._chunks():
            text += chunk
            if len(text) > size:
                break
        whole = len(text) <= size
        return text[:size].removeprefix(_BOM).decode("utf-8", "replace"), whole

    def text(self, size: int, progress: Progress | None = None) -> str:
        """Return the whole text, for a file that is not a sequence of lines.

        Raises InputError like `lines`, and where it has more than `size` bytes.
        """
        parts, found = [], 0
        for chunk, position in self._chunks():
            if progress is not None:
                progress(position)
            parts.append(chunk)
            found += len(chunk)
            if found > size:
                raise InputError(
                    f"{self.path}: holds more than {size >> 20} MiB; ask for a shorter range, or fewer points"
                )
        try:
            return b"".join(parts).removeprefix(_BOM).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None

    def lines(self, progress: Progress | None = None) -> Iterator[str]:
        """Yield the physical lines in order, without their newline (a carriage return before it stays) and without a
        BOM.

        Raises InputError, naming the file and where known the line, for text that is not UTF-8, a line above
        MAX_LINE_BYTES, a truncated or damaged gzip, and a failing read.
        """
        done = 0
        for block in self._blocks(progress):
            try:
                text = block.decode("utf-8")
            except UnicodeDecodeError as error:
                line = done + 1 + block.count(b"\n", 0, error.start)
                raise InputError(
                    f"{self.path}: line {line}: byte {block[error.start]:#04x} is not UTF-8; save the file as UTF-8"
                ) from None
            lines = text.split("\n")
            yield from lines
            done += len(lines)

    def digest(self) -> str:
        """Return the SHA-256 of the stored file in hexadecimal. Raises InputError when it cannot be read."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            _unreadable(self.path, error)

    def _blocks(self, progress: Progress | None) -> Iterator[bytes]:
        """Blocks of whole lines, each without its last newline."""
        carry = b""
        start = True
        for chunk, position in self._chunks():
            if progress is not None:
                progress(position)
            text = carry + chunk
            if start and len(text) >= len(_BOM):
                text = text.removeprefix(_BOM)
                start = False
            end = text.rfind(b"\n")
            carry = text[end + 1 :]
            if len(carry) > MAX_LINE_BYTES:
                raise InputError(
                    f"{self.path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; write one request a line"
                )
            if end >= 0:
                yield text[:end]
        if carry:
            yield carry

    def _chunks(self) -> Iterator[tuple[bytes, int]]:
        """Pieces of the text, each with the offset in the stored file up to which it was read."""
        try:
            with self.path.open("rb") as stored:
                reading: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=stored) if self.compressed else stored
                while chunk := reading.read(CHUNK_BYTES):
                    yield chunk, stored.tell()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{self.path}: damaged gzip file: {error}; compress or copy the trace again") from None
        except OSError as error:
            _unreadable(self.path, error)


def _unreadable(path: Path, error: Exception) -> NoReturn:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    raise InputError(f"cannot read the trace {path}: {reason}; check the path and its permissions") from None
