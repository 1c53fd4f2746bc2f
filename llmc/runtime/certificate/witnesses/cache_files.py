"""Files that are written into compile caches, of whatever toolchain."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from llmc.runtime.executors.compilations import Witness

MOST_FILES = 200_000
"""Files of all caches that are remembered; with more the witness is blind."""


class Stamp(NamedTuple):
    """What tells one content of a file from another: a new file has another inode, a changed one another time."""

    inode: int
    size: int
    modified_ns: int


class CacheFileWitness(Witness):
    """Sees each file that is made or changed in `folders`, by the names of the caches; they need not exist.

    `unseen`: why a toolchain here writes none of what it compiles; "" where none does that."""

    name = "files in compile caches"

    def __init__(self, folders: Mapping[str, Path], unseen: str = "") -> None:
        self.folders = dict(folders)
        self._files: dict[str, Stamp] = {}
        self._seen: list[str] = []
        self._unread = unseen

    def start(self) -> None:
        """Remember what is there."""
        self._files = self._read()

    def what(self) -> tuple[str, ...]:
        """The files, as cache: path within it."""
        now = self._read()
        self._seen += sorted(name for name, stamp in now.items() if self._files.get(name) != stamp)
        self._files = now
        return tuple(self._seen)

    def blind(self) -> str:
        """Where a cache cannot be read, holds too much, or is not kept."""
        return self._unread

    def _read(self) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        for cache, folder in self.folders.items():
            try:
                for path, status in _files(folder):
                    found[f"{cache}: {path}"] = Stamp(status.st_ino, status.st_size, status.st_mtime_ns)
                    if len(found) > MOST_FILES:
                        self._unread = f"the caches hold more than {MOST_FILES} files"
                        return found
            except OSError as error:
                self._unread = f"the cache of {cache} cannot be read ({error.strerror})"
        return found


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Files below a folder, by their paths within it; what vanishes meanwhile is passed over."""
    waiting = [""]
    while waiting:
        within = waiting.pop()
        try:
            with os.scandir(folder / within) as items:
                for item in items:
                    name = f"{within}/{item.name}" if within else item.name
                    try:
                        if item.is_dir(follow_symlinks=False):
                            waiting.append(name)
                        else:
                            yield name, item.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
        except (FileNotFoundError, NotADirectoryError):
            continue
