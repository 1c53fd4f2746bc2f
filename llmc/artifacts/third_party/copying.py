"""Files of a packed cache, copied out of the store: servers write to their caches, so nothing is linked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from llmc.artifacts.atomic_write import create_exclusive, sync_folder, write_all
from llmc.artifacts.digest import BUFFER, Blob, digest_file, open_regular
from llmc.artifacts.third_party.contents import Contents, PackedFile
from llmc.artifacts.third_party.packing import JOBS, Progress
from llmc.errors import CapacityError

REMEDY = "choose another folder with -o"


class Source(Protocol):
    """What has the files of a packed cache: a store, or a bundle."""

    def path(self, blob: Blob, /) -> Path:
        """A file with the content of `blob`, verified."""
        ...


class Files:
    """Compares the files of a packed cache with what is there, and copies them out of their source.

    `progress` is told of the bytes that were compared, and then anew of those that were copied.
    """

    def __init__(self, source: Source, contents: Contents, progress: Progress | None) -> None:
        self._source = source
        self._size = contents.size
        self._total = self._copied = self._compared = 0
        self._progress = progress

    def same(self, folder: Path, files: Mapping[str, PackedFile]) -> bool:
        """Whether regular files with these contents are there. Their modes are their owner's business."""
        try:
            sizes = all((folder / path).lstat().st_size == file.blob.size for path, file in files.items())
            return sizes and all(
                digest_file(folder / path, self._note_compared) == file.blob.digest for path, file in files.items()
            )
        except OSError:
            return False

    def expect(self, folder: Path, files: Iterable[PackedFile]) -> None:
        """These files are to be copied to `folder`. Raises CapacityError when its disk has no room for them."""
        self._total = needed = sum(file.blob.size for file in files)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if needed > (free := shutil.disk_usage(existing).free):
            raise CapacityError(f"{folder}: needs {needed} bytes, {free} are free; free some space, or {REMEDY}")

    def fill(self, folder: Path, files: Mapping[str, PackedFile], empty: Iterable[str]) -> None:
        """Make files and empty folders below an empty folder, durable. Raises OSError and BlobMissingError."""
        folders = {folder / path for path in empty} | {(folder / path).parent for path in files}
        for path in folders:
            path.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(JOBS, thread_name_prefix="llmc-unpack") as pool:
            try:
                for size in pool.map(lambda item: self._copy(folder / item[0], item[1]), files.items()):
                    self._copied += size
                    if self._progress is not None:
                        self._progress(self._copied, self._total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for path in {
            parent for below in folders for parent in (below, *below.parents) if parent.is_relative_to(folder)
        }:
            sync_folder(path)

    def _note_compared(self, count: int) -> None:
        self._compared += count
        if self._progress is not None:
            self._progress(self._compared, self._size)

    def _copy(self, path: Path, file: PackedFile) -> int:
        source = self._source.path(file.blob)
        fd = create_exclusive(path, 0o777 if file.executable else 0o666)
        try:
            with open_regular(source) as stream:
                while piece := stream.read(BUFFER):
                    write_all(fd, piece)
            os.fsync(fd)
        finally:
            os.close(fd)
        return file.blob.size
