"""A folder as a remote: a network mount, another disk. It is a store that `--cache-dir` can name.

Uploads are as durable and as atomic as what a store publishes (atomic_write.py).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from llmc.artifacts.atomic_write import BLOB_MODE, make_folder, write_atomic
from llmc.artifacts.remotes.base import ObjectError, Progress, RemoteError
from llmc.artifacts.store.layout import Layout
from llmc.errors import InputError
from llmc.paths import expanded

PIECE = 1 << 20


class FolderRemote:
    """A `base.Remote` in a folder. The first upload creates the folder; its parent must exist."""

    def __init__(self, url: str) -> None:
        self._layout = Layout(_path(url))
        self._root = self._layout.root
        self.url = str(self._root)

    def __repr__(self) -> str:
        return f"FolderRemote({self.url!r})"

    def size(self, name: str) -> int | None:
        with self._failing(name):
            try:
                status = (self._root / name).stat()
            except (FileNotFoundError, NotADirectoryError):
                self._require_mount()
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, limit: int) -> bytes | None:
        size = self.size(name)
        if size is None:
            return None
        with self._failing(name), (self._root / name).open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ObjectError(f"{self.url}: {name} is larger than {limit} bytes; delete it there")
        return data

    def download(self, name: str, start: int, size: int) -> Iterator[bytes]:
        found = self.size(name)
        if found != size:
            problem = "is missing" if found is None else f"has {found} bytes, expected {size}"
            raise ObjectError(f"{self.url}: {name} {problem}; push it again")
        with self._failing(name), (self._root / name).open("rb", buffering=0) as file:
            file.seek(start)
            while start < size and (piece := file.read(min(PIECE, size - start))):
                start += len(piece)
                yield piece

    def upload(self, name: str, source: Path | bytes, progress: Progress) -> None:
        final = self._root / name
        with self._failing(name):
            self._require_mount()
            make_folder(self._layout.temporaries)
            make_folder(final.parent)
            mode = BLOB_MODE if final.is_relative_to(self._layout.blobs) else None
            write_atomic(final, _pieces(source, progress), self._layout.temporaries, mode=mode)

    def list(self, prefix: str) -> Iterator[str]:
        """Raises RemoteError if the remote's folder is missing."""
        with self._failing(prefix):
            if not self._root.is_dir():
                raise RemoteError(f"{self.url}: no such folder; is it mounted?")
        for folder, _, files in os.walk(self._root / prefix):
            for file in files:
                yield (Path(folder) / file).relative_to(self._root).as_posix()

    def delete(self, name: str) -> None:
        with self._failing(name):
            (self._root / name).unlink(missing_ok=True)

    def _require_mount(self) -> None:
        if not self._root.parent.is_dir():
            raise RemoteError(f"{self.url}: no such folder, nor the one above it; is it mounted?")

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise RemoteError(f"{self.url}: {name}: {reason}; check the folder and try again") from error


def _path(url: str) -> Path:
    if not url.lower().startswith("file:"):
        return expanded(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InputError(f"{url}: does not name a folder on this machine; write file:///FOLDER, or only the path")
    return Path(unquote(parts.path))


def _pieces(source: Path | bytes, progress: Progress) -> Iterator[bytes]:
    """Yield the data to write; `progress` counts a piece when the next one is requested."""
    if isinstance(source, bytes):
        yield source
        progress(len(source))
        return
    with source.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            yield piece
            progress(len(piece))
