"""Streaming into a blob that is being made: written, hashed and counted as it comes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.digest import PREFIX
from llmc.artifacts.publish import write_all, writing

if TYPE_CHECKING:
    from llmc.artifacts.blobs import Blob

HASH_BESIDE_FROM = 256 << 10


class BlobWriter:
    """A write-only stream into a new blob; `blob` is set when the stream has been published."""

    def __init__(self, fd: int, path: Path, remedy: str) -> None:
        self._fd = fd
        self._path = path
        self._remedy = remedy
        self._hasher = hashlib.sha256()
        self._size = 0
        self.blob: Blob | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append `data`; returns its length in bytes. Raises CapacityError or UnwritableError."""
        view = memoryview(data).cast("B")
        with writing(self._path, self._size + view.nbytes, self._remedy), self._hashing(view):
            write_all(self._fd, view)
        self._size += view.nbytes
        return view.nbytes

    @contextmanager
    def _hashing(self, view: memoryview) -> Iterator[None]:
        """Take `view` into the digest, a large one on another core while the block runs."""
        if view.nbytes < HASH_BESIDE_FROM:
            self._hasher.update(view)
            yield
            return
        thread = threading.Thread(target=self._hasher.update, args=(view,))
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Nothing is held back."""

    @property
    def digest(self) -> str:
        """Digest of what was written so far."""
        return PREFIX + self._hasher.hexdigest()
