"""Streaming into a new blob: data is written, hashed and counted as it arrives."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.atomic_write import write_all, writing
from llmc.artifacts.digest import PREFIX

if TYPE_CHECKING:
    from queue import Queue

    from llmc.artifacts.digest import Blob

BESIDE_FROM = 256 << 10
SYNC_FROM = 8 << 20
DEPTH = 16


class BlobWriter:
    """A write-only stream into a new blob; `blob` is set when the stream has been published.

    Large pieces are hashed on another core while they are written and synced.
    """

    def __init__(self, fd: int, path: Path, remedy: str) -> None:
        self._fd = fd
        self._path = path
        self._remedy = remedy
        self._hasher = _Hasher()
        self._size = 0
        self.blob: Blob | None = None

    def write(self, data: bytes | bytearray | memoryview, *, kept: bool = False) -> int:
        """Append `data`; return its length in bytes. Raises CapacityError or UnwritableError.

        `kept`: the caller leaves `data` unchanged until the stream is published, so that hashing need not be waited
        for.
        """
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        try:
            with writing(self._path, self._size + view.nbytes, self._remedy):
                write_all(self._fd, view)
        finally:
            if not (kept or isinstance(data, bytes)):
                self._hasher.wait()
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def settle(self) -> None:
        """Sync a large blob to disk while the rest of it is hashed. Raises CapacityError or UnwritableError."""
        if self._size >= SYNC_FROM:
            with writing(self._path, self._size, self._remedy):
                os.fsync(self._fd)

    def close(self) -> None:
        """End the hashing; nothing can be written any more."""
        self._hasher.close()

    @property
    def digest(self) -> str:
        """Digest of the bytes written so far."""
        return PREFIX + self._hasher.hexdigest()


class _Hasher:
    """sha256 in the order of `update`; a thread hashes large pieces, with at most DEPTH of them queued."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pieces: Queue[memoryview | None] | None = None

    def update(self, view: memoryview) -> None:
        if view.nbytes < BESIDE_FROM:
            self.wait()
            self._hash.update(view)
            return
        if self._pieces is None:
            from queue import Queue

            self._pieces = Queue(DEPTH)
            threading.Thread(target=self._run, args=(self._pieces,), daemon=True).start()
        self._pieces.put(view)

    def wait(self) -> None:
        if self._pieces is not None:
            self._pieces.join()

    def hexdigest(self) -> str:
        self.wait()
        return self._hash.hexdigest()

    def close(self) -> None:
        if self._pieces is not None:
            self._pieces.put(None)
            self._pieces.join()
            self._pieces = None

    def _run(self, pieces: Queue[memoryview | None]) -> None:
        while (view := pieces.get()) is not None:
            self._hash.update(view)
            del view
            pieces.task_done()
        pieces.task_done()
