"""A whole store: its verification, disk usage, the bytes that only one entry uses, and leftovers of dead processes."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.digest import PREFIX, Blob
from llmc.artifacts.flock import probe
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.layout import HEX, File, Layout, files_of, scan
from llmc.artifacts.store.locks import is_local
from llmc.artifacts.store.workspace import Area, find_blob


class Bad(NamedTuple):
    """Something damaged: the digest of a blob or the kind and key of an entry, and what is wrong."""

    name: str
    reason: str


class AuditReport(NamedTuple):
    """The blobs, their bytes, and the entries that were read, and those that were quarantined."""

    blobs: int
    bytes: int
    entries: int
    bad: list[Bad]


class StoreUsage(NamedTuple):
    """Files and bytes in a store, each file counted once.

    `bundle_bytes` are those of bundle folders that are not blobs as well, `other_bytes` those of quarantine and
    temporaries.
    """

    blobs: int
    blob_bytes: int
    entries: int
    entry_bytes: int
    other_bytes: int
    bundle_bytes: int

    @property
    def total(self) -> int:
        """Bytes on disk."""
        return self.blob_bytes + self.entry_bytes + self.other_bytes + self.bundle_bytes


def verify(areas: Sequence[Area], progress: Callable[[str, int], None] | None = None) -> AuditReport:
    """Read every blob and entry of the first area and quarantine damaged ones, as `Store.verify` describes.

    The outputs of its entries may lie in any of `areas`: a compile refers to what it finds in a shared store.
    """
    area = areas[0]
    bad: list[Bad] = []
    blobs = total = entries = 0
    for digest, item in list(area.layout.all_blobs()):
        with suppress(FileNotFoundError):
            size = item.stat(follow_symlinks=False).st_size
            blobs, total = blobs + 1, total + size
            if problem := area.blobs.reread(digest):
                bad.append(Bad(digest, problem))
            if progress is not None:
                progress(digest, size)
    for kind, item in list(area.layout.all_entries()):
        entries += 1
        entry = area.entries.load(Path(item.path), PREFIX + Path(item.path).stem)
        if entry is None:
            bad.append(Bad(f"{kind}/{item.name[:12]}", "not a sound entry"))
            continue
        lost = [name for name, blob in entry.outputs.items() if not find_blob(areas, *blob, verify=False)]
        if lost:
            reason = f"missing or damaged: {', '.join(lost)}"
            area.entries.reject(entry, reason)
            bad.append(Bad(f"{kind}/{entry.key.short}", reason))
    sweep(area.layout, Remover())
    return AuditReport(blobs, total, entries, bad)


def usage(layout: Layout) -> StoreUsage:
    """Return the files and bytes in a store."""
    seen: set[tuple[int, int]] = set()
    blobs, blob_bytes = _sizes((Path(item.path) for _, item in layout.all_blobs()), seen)
    entries, entry_bytes = _sizes((Path(item.path) for _, item in layout.all_entries()), seen)
    _, bundle_bytes = _sizes([layout.bundles], seen)
    _, other_bytes = _sizes([layout.quarantine, layout.temporaries], seen)
    return StoreUsage(blobs, blob_bytes, entries, entry_bytes, other_bytes, bundle_bytes)


def _sizes(paths: Iterable[Path], seen: set[tuple[int, int]]) -> tuple[int, int]:
    count = size = 0
    for file in chain.from_iterable(map(files_of, paths)):
        count += 1
        size += 0 if file.inode in seen else file.size
        seen.add(file.inode)
    return count, size


class Share(NamedTuple):
    """Bytes of an entry's blobs: no other entry names the `own` ones, which are removed with it."""

    own: int
    shared: int

    @property
    def size(self) -> int:
        """Bytes of all its blobs, each counted once."""
        return self.own + self.shared


def shares(entries: Iterable[Entry]) -> Mapping[str, Share]:
    """Return each entry's share by the digest of its key; `entries` must be all that a store has."""
    blobs = {entry.key.digest: frozenset(entry.outputs.values()) for entry in entries}
    names: Counter[Blob] = Counter(blob for found in blobs.values() for blob in found)
    result = {}
    for digest, found in blobs.items():
        own = sum(blob.size for blob in found if names[blob] == 1)
        result[digest] = Share(own, sum(blob.size for blob in found) - own)
    return result


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
    sure = is_local(layout.base)
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
