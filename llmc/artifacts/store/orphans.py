"""Files that no process will use again: leftovers of dead processes, and locks of keys without an entry."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from llmc.artifacts.flock import probe
from llmc.artifacts.store.layout import HEX, File, Layout, files_of, scan
from llmc.artifacts.store.publish_lock import is_of_one_machine

STALE_SECONDS = 3 * 24 * 3600.0
DEAD_SECONDS = 60.0
_OURS = re.compile(r"[0-9a-f]{24}")
_SIBLING = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(new|old)")


class Remover:
    """Removes files and folders, and counts the bytes returned to the disk; with `dry_run` it only counts.

    `removed` counts files and folders, `freed` and `linked` bytes: a file is freed with the last of its names. `failed`
    gives, by path, why something could not be removed.
    """

    def __init__(self, dry_run: bool = False) -> None:
        self.dry_run = dry_run
        self.removed = 0
        self.failed: dict[str, str] = {}
        self._names: Counter[tuple[int, int]] = Counter()
        self._files: dict[tuple[int, int], File] = {}

    def remove(self, path: Path, known_as: Path | None = None) -> bool:
        """Remove a file or a whole folder if it exists; return False, noted in `failed`, if that fails."""
        import shutil

        files = list(files_of(path))
        if not self.dry_run:
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            except FileNotFoundError:
                return True
            except OSError as error:
                self.failed[str(known_as or path)] = error.strerror or str(error)
                return False
        self.removed += 1
        for file in files:
            self._names[file.inode] += 1
            self._files.setdefault(file.inode, file)
        return True

    @property
    def freed(self) -> int:
        """Bytes returned to the disk."""
        return sum(file.size for file in self._files.values() if self._names[file.inode] >= file.links)

    @property
    def linked(self) -> int:
        """Bytes of removed files that stay on the disk because of other names."""
        return sum(file.size for file in self._files.values() if self._names[file.inode] < file.links)


def sweep(layout: Layout, remover: Remover, now: float | None = None) -> None:
    """Remove temporaries that were not touched for STALE_SECONDS, or whose process is known to be dead.

    Also removes what dead writers left next to bundles, and locks of keys without an entry. `now` is the store's time.
    """
    moment = time.time() if now is None else now
    sure = is_of_one_machine(layout)
    for path, locked in _candidates(layout):
        with suppress(OSError):
            status = path.lstat()
            if not locked and abs(moment - status.st_mtime) > STALE_SECONDS:
                remover.remove(path)
            elif locked and abs(moment - status.st_ctime) > DEAD_SECONDS:
                with probe(path) as free:
                    known = free and sure
                    if known or (free is not False and abs(moment - status.st_ctime) > STALE_SECONDS):
                        remover.remove(path)


def _candidates(layout: Layout) -> Iterator[tuple[Path, bool]]:
    """Yield files that may be garbage, and whether their writers hold a lock on them."""
    for item in scan(layout.temporaries):
        yield Path(item.path), _OURS.fullmatch(item.name) is not None
    for item in scan(layout.bundles):
        if found := _SIBLING.fullmatch(item.name):
            yield Path(item.path), found[2] == "new" or (layout.bundles / found[1]).is_dir()
    for item in scan(layout.locks):
        kind, _, digits = item.name.rpartition("-")
        if HEX.fullmatch(digits) and not layout.entry(kind, digits).exists():
            yield Path(item.path), True
