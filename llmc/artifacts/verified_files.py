"""Stamps: records of verified files, so that weights of many gigabytes are not hashed at every start.

    table  = {"schema": 1, "files": {real path: [device, inode, size, mtime_ns, ctime_ns, digest]}}
    tables = <store>/v1/.stamps.json          of the files of a store that only this user may write
             <cache>/stamps/<32 hex>.json     of anything else, by the sha256 of its real path: bundle folders, and
                                              stores that others may write

A stamp says that the file had this digest when `stat` returned this device, inode, size and these times. Writing,
replacing, linking or restoring a file changes its ctime, which no program can set. So every change through the file
system is noticed, but not damage below it. A table is used only from a folder that only this user may write, and never
from inside a bundle. So a user who can change a file cannot also change its stamp. A file that changed within the
clock's granularity before it was hashed is never stamped, since a second change in the same tick would leave no trace.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.atomic_write import write_atomic
from llmc.artifacts.digest import is_digest, open_regular
from llmc.artifacts.ownership import is_own, may_hold_own, own_cache

SCHEMA = 1
FILE_NAME = ".stamps.json"
FOLDER = "stamps"
MOST_TABLES = 512
"""Most tables to keep; those written longest ago are deleted first."""
MAX_BYTES = 4 << 20
MAX_FILES = 8192
FINE_TICK_NS = 20_000_000
COARSE_TICK_NS = 2_000_000_000


class FileSignature(NamedTuple):
    """What the file system records about a file; differs after any change to it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def signature(status: os.stat_result) -> FileSignature:
    """Return the part of a `stat` result that changes when the file does."""
    return FileSignature(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def settled(seen: FileSignature) -> bool:
    """Whether a file's last change is longer ago than the granularity of its clock."""
    coarse = seen.ctime_ns % 1_000_000_000 == 0
    tick = COARSE_TICK_NS if coarse else FINE_TICK_NS
    return time.time_ns() - max(seen.mtime_ns, seen.ctime_ns) > tick


class VerifiedFiles:
    """The table of one folder. Never raises, whatever the disk does: files without a stamp are hashed again."""

    def __init__(self, folder: str | Path, *, inside: bool = True) -> None:
        """`inside`: the table may be in the folder, if only this user may write it."""
        self._folder = Path(folder)
        self._inside = inside
        self._location: Path | None = None
        self._table: dict[str, tuple[FileSignature, str]] | None = None
        self._dirty = False
        self._folders: dict[str, str] = {}

    def verified(self, path: str | Path, digest: str) -> bool:
        """Whether `path` was found to have this digest and is unchanged since. Costs one `stat`."""
        try:
            seen = signature(os.stat(path))  # noqa: PTH116
            return self._load().get(self._name(path)) == (seen, digest)
        except (OSError, ValueError):
            return False

    def record(self, path: str | Path, digest: str, seen: FileSignature | None = None) -> None:
        """Note that `path` has this digest; `seen` is its signature from before it was hashed.

        Nothing is noted if the file changed since then, or so shortly before that a change could hide.
        """
        try:
            name = self._name(path)
            now = signature(os.stat(path))  # noqa: PTH116
        except (OSError, ValueError):
            return
        if (seen is None or seen == now) and settled(now):
            self._load()[name] = (now, digest)
            self._dirty = True

    def save(self) -> None:
        """Write the table if it changed, merged with what other processes saved meanwhile."""
        if not self._dirty:
            return
        self._dirty = False
        file = self._file
        table = _read(file) | self._load()
        kept = list(table.items())[-MAX_FILES:]
        files = {name: [*seen, digest] for name, (seen, digest) in kept if os.path.exists(name)}  # noqa: PTH110
        try:
            data = json.dumps({"schema": SCHEMA, "files": files}, separators=(",", ":")).encode()
            file.parent.mkdir(0o700, parents=True, exist_ok=True)
            if file.name != FILE_NAME and not file.exists():
                _forget_some(file.parent)
            write_atomic(file, data, file.parent, durable=False, mode=0o600)
        except (OSError, ValueError):
            return

    @property
    def _file(self) -> Path:
        if self._location is None:
            self._location = self._choose()
        return self._location

    def _choose(self) -> Path:
        if self._inside and may_hold_own(self._folder):
            return self._folder / FILE_NAME
        name = hashlib.sha256(os.fsencode(os.path.realpath(self._folder))).hexdigest()[:32]
        return own_cache() / FOLDER / f"{name}.json"

    def _name(self, path: str | Path) -> str:
        """Return the real path, the file's name in the table. Folders are cached; a wrong name only means no stamp."""
        folder, name = os.path.split(path)
        if not os.path.isabs(folder) or os.path.islink(path):  # noqa: PTH114, PTH117
            return os.path.realpath(path)
        return os.path.join(self._real(folder), name)  # noqa: PTH118

    def _real(self, folder: str) -> str:
        if (found := self._folders.get(folder)) is None:
            parent, name = os.path.split(folder)
            if parent == folder or name in ("", ".", "..") or os.path.islink(folder):  # noqa: PTH114
                found = os.path.realpath(folder)
            else:
                found = os.path.join(self._real(parent), name)  # noqa: PTH118
            self._folders[folder] = found
        return found

    def _load(self) -> dict[str, tuple[FileSignature, str]]:
        if self._table is None:
            self._table = _read(self._file)
        return self._table


def _read(file: Path) -> dict[str, tuple[FileSignature, str]]:
    """Read the table in `file`; empty if it is missing, invalid, or could have been written by others."""
    table: dict[str, tuple[FileSignature, str]] = {}
    try:
        with open_regular(file) as stream:
            if not (is_own(os.fstat(stream.fileno())) and is_own(os.stat(file.parent))):  # noqa: PTH116
                return {}
            data = json.loads(stream.read(MAX_BYTES))
        if data["schema"] != SCHEMA:
            return {}
        for name, (*numbers, digest) in data["files"].items():
            if len(numbers) == len(FileSignature._fields) and is_digest(digest):
                table[name] = (FileSignature(*numbers), digest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return table


def _forget_some(folder: Path) -> None:
    with suppress(OSError), os.scandir(folder) as items:
        tables = [item for item in items if item.name.endswith(".json")]
        if len(tables) >= MOST_TABLES:
            for item in sorted(tables, key=lambda item: item.stat().st_mtime)[: MOST_TABLES // 4]:
                os.unlink(item)  # noqa: PTH108
