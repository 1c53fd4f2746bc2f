"""A read-only memory map of a checkpoint file, with bounds-checked little-endian reads."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from llmc.errors import CheckpointError

_POINTER = b"version https://git-lfs.github.com/spec/"


def require_content(path: Path, beginning: bytes) -> None:
    """Raise CheckpointError for a file that Git LFS has not fetched, by its first bytes."""
    if beginning.startswith(_POINTER):
        raise CheckpointError(f"{path}: a Git LFS pointer instead of the file; run `git lfs pull` in its folder")


class MappedFile:
    """A mapped file. The map lives as long as this object or any array made from `buffer`. Raises CheckpointError for a
    missing, unreadable or empty file, and for every read past the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self.size = stream.seek(0, 2)
                if self.size == 0:
                    raise CheckpointError(f"{path}: the file is empty (0 bytes); fetch it again")
                self.buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        require_content(path, self.buffer[: len(_POINTER)])

    def forget(self) -> None:
        """Release the file's pages; the next read loads them again."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def error(self, what: str) -> CheckpointError:
        """A CheckpointError about this file."""
        return CheckpointError(f"{self.path}: {what}")

    def need(self, offset: int, size: int, what: str) -> None:
        """Raise CheckpointError unless `size` bytes exist at `offset`."""
        if size < 0 or offset + size > self.size:
            raise self.error(
                f"truncated or damaged: {what} at byte {offset} needs {size} bytes, but the file ends at "
                f"{self.size}; fetch it again"
            )

    def unpack(self, layout: struct.Struct, offset: int, what: str) -> tuple[int | float | bool, ...]:
        """Unpack values of a fixed layout at `offset`."""
        self.need(offset, layout.size, what)
        return layout.unpack_from(self.buffer, offset)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Read `size` bytes at `offset`."""
        self.need(offset, size, what)
        return self.buffer[offset : offset + size]
