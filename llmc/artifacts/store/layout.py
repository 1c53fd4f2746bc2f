"""The layout of a store's files.

    store      = <root> "/v" SCHEMA "/" ( blob | entry | bundle | quarantine | temporary | lock | gate | lease |
                                          pin | stamps )
    blob       = "blobs/sha256/" 2 hex "/" 62 hex          content; read-only file; its name is its digest
    entry      = "entries/" kind "/" 64 hex ".json"        the blobs that a key was built into; its name is the
                                                           digest; its mtime is the time of last use
    quarantine = "quarantine/" any                         damaged files, kept for inspection; safe to delete
    temporary  = "tmp/" any                                being written; garbage after a crash, at once when named by
                                                           24 hex digits and locked by nobody
    bundle     = "bundles/" 16 to 64 hex "/"               a bundle folder (see bundle/reader.py) whose blobs are links
                                                           to blobs; its mtime is the time of last use
    lock       = "locks/" kind "-" 64 hex                  empty; held by flock while a key is being built
    gate       = "locks/collect"                           see locks.py
    lease      = "leases/" 24 hex                          see leases.py
    pin        = "pins/" kind "-" 64 hex                   see leases.py
    stamps     = ".stamps.json"                            see verified_files.py; safe to delete

Another SCHEMA is another folder, so versions of llmc with different layouts can share a root.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.atomic_write import make_folder
from llmc.artifacts.digest import PREFIX, parse
from llmc.artifacts.log import logger

SCHEMA = 1
HEX = re.compile(r"[0-9a-f]{64}")
_HEX62 = re.compile(r"[0-9a-f]{62}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.json")


class Layout:
    """The paths of one store. Creates nothing by itself; nothing is moved in a `read_only` one."""

    def __init__(self, root: str | Path, *, read_only: bool = False) -> None:
        self.read_only = read_only
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - absolute, but links are the user's business
        self.base = self.root / f"v{SCHEMA}"
        self.blobs = self.base / "blobs" / "sha256"
        self.entries = self.base / "entries"
        self.bundles = self.base / "bundles"
        self.quarantine = self.base / "quarantine"
        self.temporaries = self.base / "tmp"
        self.locks = self.base / "locks"
        self.gate = self.locks / "collect"
        self.leases = self.base / "leases"
        self.pins = self.base / "pins"

    def blob(self, digest: str) -> Path:
        """Return the path of a blob. Raises ValueError for an invalid digest."""
        name = parse(digest)
        return self.blobs / f"{name[:2]}/{name[2:]}"

    def entry(self, kind: str, hex_digest: str) -> Path:
        """Return the path of a key's entry."""
        return self.entries / f"{kind}/{hex_digest}.json"

    def lock(self, kind: str, hex_digest: str) -> Path:
        """Return the path of a key's lock."""
        return self.locks / f"{kind}-{hex_digest}"

    def pin(self, kind: str, hex_digest: str) -> Path:
        """Return the path of a key's pin."""
        return self.pins / f"{kind}-{hex_digest}"

    def all_blobs(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield every blob's digest and folder entry; other files are ignored."""
        for folder in scan(self.blobs):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for item in scan(Path(folder.path)):
                if _HEX62.fullmatch(item.name):
                    yield f"{PREFIX}{folder.name}{item.name}", item

    def all_entries(self, kind: str | None = None) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield every entry's kind and folder entry, or those of one kind."""
        kinds = [kind] if kind is not None else [folder.name for folder in scan(self.entries) if folder.is_dir()]
        for name in kinds:
            for item in scan(self.entries / name):
                if _ENTRY.fullmatch(item.name):
                    yield name, item

    def set_aside(self, path: Path, reason: str, seen: os.stat_result | None = None) -> None:
        """Move a damaged file into quarantine and log why; in a store that cannot be written, it stays.

        Nothing is moved if `path` is no longer the file that was `seen` damaged: another process has repaired it. A
        file that was repaired during the move is put back.
        """
        logger().warning("damaged: %s: %s; counted as a miss, it will be built again", path, reason)
        if self.read_only:
            return
        try:
            if seen is not None and not _is_same(path, seen):
                return
            make_folder(self.quarantine)
            aside = self.quarantine / f"{path.parent.name}-{path.name}-{time.time_ns()}"
            path.rename(aside)
            if seen is not None and not _is_same(aside, seen):
                put_back(aside, path)
        except OSError as error:
            logger().debug("could not be moved to quarantine: %s", error)


def put_back(aside: Path, path: Path) -> None:
    """Undo a move, unless the path exists again. Raises OSError."""
    try:
        os.link(aside, path)
    except FileExistsError:
        pass
    except OSError:  # a folder, or a file system without links
        os.rename(aside, path)  # noqa: PTH104
        return
    aside.unlink()


def _is_same(path: Path, seen: os.stat_result) -> bool:
    now = path.stat()
    return (now.st_dev, now.st_ino, now.st_size) == (seen.st_dev, seen.st_ino, seen.st_size)


def scan(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; none if it is missing or cannot be read."""
    try:
        with os.scandir(folder) as items:
            yield from items
    except OSError:
        return


class File(NamedTuple):
    """A file by its inode, which has `links` names in the file system; size in bytes, times since 1970."""

    inode: tuple[int, int]
    size: int
    links: int
    modified: float
    changed: float


def files_of(path: Path) -> Iterator[File]:
    """Yield the file at `path`, or every file below the folder; links are not followed."""
    with suppress(OSError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            yield file_of(status)
            return
    for item in scan(path):
        yield from files_of(Path(item.path))


def file_of(status: os.stat_result) -> File:
    """Return the `File` of a `stat` result."""
    inode = status.st_dev, status.st_ino
    return File(inode, status.st_size, status.st_nlink, status.st_mtime, status.st_ctime)
