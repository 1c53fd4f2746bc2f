"""Where a store keeps its files.

    store      = <root> "/v" SCHEMA "/" ( blob | entry | quarantine | temporary | lock | stamps )
    blob       = "blobs/sha256/" 2 hex "/" 62 hex          content; read-only file; its name is its digest
    entry      = "entries/" kind "/" 64 hex ".json"        what a key was built into; its name is the digest;
                                                           its mtime is the time of last use
    quarantine = "quarantine/" any                         damaged files, kept for a look; safe to delete
    temporary  = "tmp/" any                                what is being written; garbage after a crash
    lock       = "locks/" kind "-" 64 hex                  empty; held by flock while a key is being built
    stamps     = ".stamps.json"                            see stamps.py; safe to delete

Another SCHEMA is another folder: versions of llmc that disagree on the layout share a root without meeting.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from llmc.artifacts.digest import PREFIX, parse
from llmc.artifacts.log import logger
from llmc.artifacts.publish import make_folder

SCHEMA = 1
_HEX62 = re.compile(r"[0-9a-f]{62}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.json")


class Layout:
    """The paths of one store. Creates nothing by itself."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - absolute, but links are the user's business
        self.base = self.root / f"v{SCHEMA}"
        self.blobs = self.base / "blobs" / "sha256"
        self.entries = self.base / "entries"
        self.quarantine = self.base / "quarantine"
        self.temporaries = self.base / "tmp"
        self.locks = self.base / "locks"

    def blob(self, digest: str) -> Path:
        """Path of a blob. Raises ValueError for what is not a digest."""
        name = parse(digest)
        return self.blobs / name[:2] / name[2:]

    def entry(self, kind: str, hex_digest: str) -> Path:
        """Path of the entry of a key."""
        return self.entries / kind / f"{hex_digest}.json"

    def lock(self, kind: str, hex_digest: str) -> Path:
        """Path of the lock of a key."""
        return self.locks / f"{kind}-{hex_digest}"

    def all_blobs(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Every blob's digest and folder entry; strangers among them are passed over."""
        for folder in scan(self.blobs):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for item in scan(Path(folder.path)):
                if _HEX62.fullmatch(item.name):
                    yield f"{PREFIX}{folder.name}{item.name}", item

    def all_entries(self, kind: str | None = None) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Every entry's kind and folder entry, or those of one kind."""
        kinds = [kind] if kind is not None else [folder.name for folder in scan(self.entries) if folder.is_dir()]
        for name in kinds:
            for item in scan(self.entries / name):
                if _ENTRY.fullmatch(item.name):
                    yield name, item

    def set_aside(self, path: Path, reason: str, seen: os.stat_result | None = None) -> None:
        """Move a damaged file into quarantine and log why; in a store that cannot be written it stays.

        Nothing is moved when `path` is no longer the file that was `seen` damaged: another process has healed
        it.
        """
        logger().warning("damaged: %s: %s; counted as a miss, it will be built again", path, reason)
        try:
            if seen is not None:
                now = path.stat()
                if (now.st_dev, now.st_ino, now.st_size) != (seen.st_dev, seen.st_ino, seen.st_size):
                    return
            make_folder(self.quarantine)
            path.rename(self.quarantine / f"{path.parent.name}-{path.name}-{time.time_ns()}")
        except OSError as error:
            logger().debug("could not be moved to quarantine: %s", error)


def scan(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder; none when it is missing or cannot be read."""
    try:
        with os.scandir(folder) as items:
            yield from items
    except OSError:
        return
