"""Temporary folders, and the removal of those that killed processes left.

    folder = <the system's temporary folder> "/llmc-" what "-" random ".tmp"

A folder is locked (flock.py) as long as its process, or a forked child, lives. The next process that creates one, and
`llmc cache gc`, remove those that nobody holds. Folders of another user stay, and so does everything on a file system
where locks mean nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.flock import locked_folder, probe

PREFIX, SUFFIX = "llmc-", ".tmp"


class Swept(NamedTuple):
    """The number of removed folders, and the bytes of their files."""

    folders: int = 0
    freed: int = 0


@contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """Yield a new folder that only this user may enter, removed with its content at the end. Raises OSError."""
    import shutil
    import tempfile

    def make() -> Path:
        return Path(tempfile.mkdtemp(SUFFIX, f"{PREFIX}{what}-"))

    sweep()
    folder, fd = locked_folder(make) if hasattr(os, "O_DIRECTORY") else (make(), None)  # Windows has no such locks
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if fd is not None:
            os.close(fd)


def sweep(*, dry_run: bool = False) -> Swept:
    """Remove the folders of processes that have ended, or only count them. Never raises OSError."""
    import shutil

    folders = freed = 0
    for path in _left():
        with suppress(OSError, ModuleNotFoundError), probe(path) as is_free:
            if is_free:
                size = sum(file.lstat().st_size for file in path.rglob("*"))
                if not dry_run:
                    shutil.rmtree(path)
                folders, freed = folders + 1, freed + size
    return Swept(folders, freed)


def _left() -> list[Path]:
    """Return this user's temporary folders; links and files with such names are ignored."""
    import tempfile

    found = []
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as items:
        for item in items:
            if item.name.startswith(PREFIX) and item.name.endswith(SUFFIX):
                with suppress(OSError):
                    seen = item.stat(follow_symlinks=False)
                    if stat.S_ISDIR(seen.st_mode) and seen.st_uid == user:
                        found.append(Path(item.path))
    return found
