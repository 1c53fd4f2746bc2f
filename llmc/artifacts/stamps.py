"""Which files were verified before, so that weights of many gigabytes are not hashed at every start.

    .stamps.json = {"schema": 1, "files": {real path: [device, inode, size, mtime_ns, ctime_ns, digest]}}

A stamp says: this file had this digest when its inode looked so. Writing, replacing, linking or restoring a
file changes its ctime, which no program can set, so every alteration made through the file system is noticed.
Not noticed: damage below the file system, and a liar who may write the table itself (who may also write the
files). A file that changed within the clock's granularity before it was hashed is never stamped, since a
second change in the same tick would leave no trace.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.digest import is_digest, open_regular
from llmc.artifacts.publish import write_atomic

SCHEMA = 1
FILE_NAME = ".stamps.json"
MAX_BYTES = 4 << 20
MAX_FILES = 8192
FINE_TICK_NS = 20_000_000
COARSE_TICK_NS = 2_000_000_000


class Signature(NamedTuple):
    """What the file system says of a file; differs after any change to it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def signature(status: os.stat_result) -> Signature:
    """The part of a `stat` that changes when the file does."""
    return Signature(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def settled(seen: Signature) -> bool:
    """Whether a file, seen so just now, has been still for longer than its clock's granularity."""
    coarse = seen.ctime_ns % 1_000_000_000 == 0
    tick = COARSE_TICK_NS if coarse else FINE_TICK_NS
    return time.time_ns() - max(seen.mtime_ns, seen.ctime_ns) > tick


class Stamps:
    """The table of one folder. Never raises, whatever the disk does: what is not stamped is hashed again."""

    def __init__(self, folder: str | Path) -> None:
        self._file = Path(folder) / FILE_NAME
        self._table: dict[str, tuple[Signature, str]] | None = None
        self._dirty = False
        self._folders: dict[str, str] = {}

    def verified(self, path: str | Path, digest: str) -> bool:
        """Whether `path` was found to have this digest and has not been touched since. One `stat`."""
        try:
            seen = signature(os.stat(path))  # noqa: PTH116
            return self._load().get(self._name(path)) == (seen, digest)
        except (OSError, ValueError):
            return False

    def record(self, path: str | Path, digest: str, seen: Signature | None = None) -> None:
        """Note that `path` has this digest; `seen` is its signature from before it was hashed.

        Nothing is noted when the file changed since then, or so shortly before that a change could hide.
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
        """Write the table if it changed, together with what other processes saved meanwhile."""
        if not self._dirty:
            return
        self._dirty = False
        table = _read(self._file) | self._load()
        kept = list(table.items())[-MAX_FILES:]
        files = {name: [*seen, digest] for name, (seen, digest) in kept if os.path.exists(name)}  # noqa: PTH110
        try:
            data = json.dumps({"schema": SCHEMA, "files": files}, separators=(",", ":")).encode()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._file, data, self._file.parent, durable=False)
        except (OSError, ValueError):
            return

    def _name(self, path: str | Path) -> str:
        """The real path, by which a file is known. A wrong name is only a file not known: folders are remembered."""
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

    def _load(self) -> dict[str, tuple[Signature, str]]:
        if self._table is None:
            self._table = _read(self._file)
        return self._table


def _read(file: Path) -> dict[str, tuple[Signature, str]]:
    """The table in `file`; empty when there is none or it is not one."""
    table: dict[str, tuple[Signature, str]] = {}
    try:
        with open_regular(file) as stream:
            data = json.loads(stream.read(MAX_BYTES))
        if data["schema"] != SCHEMA:
            return {}
        for name, (*numbers, digest) in data["files"].items():
            if len(numbers) == len(Signature._fields) and is_digest(digest):
                table[name] = (Signature(*numbers), digest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return table
