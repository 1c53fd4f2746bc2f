"""Files by their inode: each counts once, however many names it has."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.store.layout import scan


class File(NamedTuple):
    """A file by its inode, which has `links` names in the file system; size in bytes, times since 1970."""

    inode: tuple[int, int]
    size: int
    links: int
    modified: float
    changed: float


def files_of(path: Path) -> Iterator[File]:
    """The file at `path`, or every file below the folder; links are not followed."""
    with suppress(OSError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            yield file_of(status)
            return
    for item in scan(path):
        yield from files_of(Path(item.path))


def file_of(status: os.stat_result) -> File:
    """A file from what stat says of it."""
    inode = status.st_dev, status.st_ino
    return File(inode, status.st_size, status.st_nlink, status.st_mtime, status.st_ctime)
