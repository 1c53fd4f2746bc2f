"""Checks of a whole store: verification, disk usage, and the bytes that only one entry uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.digest import PREFIX, Blob
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.layout import Layout, files_of
from llmc.artifacts.store.lookup import find_blob
from llmc.artifacts.store.orphans import Remover, sweep
from llmc.artifacts.store.workspace import Area


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
    """Return the number of files at or below these paths, and the bytes of those not seen before."""
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
    return {digest: _share(found, names) for digest, found in blobs.items()}


def _share(blobs: frozenset[Blob], names: Mapping[Blob, int]) -> Share:
    own = sum(blob.size for blob in blobs if names[blob] == 1)
    return Share(own, sum(blob.size for blob in blobs) - own)
