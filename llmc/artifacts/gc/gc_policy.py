"""Selects the items and blobs that a collection removes, from an inventory and without touching files.

1. Items last used more than `max_age` ago are removed.
2. Blobs that no entry names are removed, except those stored within `grace`: a build may be about to publish them.
3. While there is more than `max_size`: first quarantined files, then the least recently used item.
4. Of the items chosen in 3, newest first: one whose removal frees only its own small file stays after all, if it fits.
   Other items keep its blobs anyway, and keeping it saves a build.

Pinned and used items stay. A bundle folder that was created or opened within OPENING_SECONDS stays as well: its creator
is about to open it. Sizes count every file once, however many names it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from llmc.artifacts.gc.inventory import Inventory, Item
from llmc.artifacts.store.layout import File
from llmc.artifacts.store.leases import blob_name

QUARANTINE_SECONDS = 7 * 24 * 3600.0
OPENING_SECONDS = 60.0
NOTHING: Mapping[str, str] = MappingProxyType({})


class RetentionLimits(NamedTuple):
    """Limits of a store in bytes and seconds, None for no limit; `now` by the store's own clock.

    `alone`: leases show for certain what is used. Otherwise, items used or stored within `grace` stay as well. `named`:
    only these items, and what no other names, are removed, whatever the limits.
    """

    max_size: int | None
    max_age: float | None
    grace: float
    now: float
    alone: bool
    named: frozenset[str] | None = None


class CollectionPlan(NamedTuple):
    """What to remove, in this order, and what is left.

    `freed` bytes are returned to the disk; `linked` bytes are not, because other names hold on to them; `size` bytes
    stay in the store. `kept` counts items over a limit by the reason they stay: "pinned", "in use", "used within the
    grace period", "put to use meanwhile", "cannot be removed". No entry names the `waiting` bytes yet, but one may
    soon.
    """

    items: tuple[str, ...]
    blobs: tuple[str, ...]
    quarantine: tuple[Path, ...]
    freed: int
    linked: int
    size: int
    kept: Mapping[str, int]
    waiting: int


class CollectionStage(NamedTuple):
    """The next item to remove as a size limit shrinks.

    `freed` bytes are removed with the item, `left` bytes remain in the store.
    """

    name: str
    freed: int
    left: int


class _Ledger:
    """Bytes of a set of files, each counted once."""

    def __init__(self) -> None:
        self.total = 0
        self._names: Counter[tuple[int, int]] = Counter()
        self._all: Counter[tuple[int, int]] = Counter()
        self._files: dict[tuple[int, int], File] = {}

    def start(self, files: Iterable[File]) -> None:
        for file in files:
            self._all[file.inode] += 1
            self._files[file.inode] = file
        self.add(files)

    def add(self, files: Iterable[File]) -> None:
        for file in files:
            self.total += 0 if self._names[file.inode] else file.size
            self._names[file.inode] += 1

    def drop(self, files: Iterable[File]) -> None:
        for file in files:
            self._names[file.inode] -= 1
            self.total -= 0 if self._names[file.inode] else file.size

    def gone(self) -> Iterator[tuple[File, bool]]:
        """Yield files that lost a name, and whether that was their last one anywhere."""
        for inode, file in self._files.items():
            if self._names[inode] < self._all[inode]:
                yield file, self._names[inode] == 0 and file.links <= self._all[inode]


def size_of(census: Inventory) -> int:
    """Return the bytes in a store: entries, bundle folders, blobs and quarantine, each file once."""
    ledger = _Ledger()
    for files in _all_files(census):
        ledger.start(files)
    return ledger.total


def decide(
    census: Inventory, limits: RetentionLimits, doomed: Set[str] = frozenset(), stuck: Mapping[str, str] = NOTHING
) -> CollectionPlan:
    """Return the plan.

    `doomed` are the blobs of items removed a moment ago, `stuck` the names that cannot be removed, with the reason.
    """
    return _Decision(census, limits, doomed, stuck).make()


def stages(census: Inventory, limits: RetentionLimits) -> list[CollectionStage]:
    """Return what an ever smaller `max_size` removes, in order, after garbage and quarantine.

    Sizes and ages in `limits` are ignored. Items that step 4 would keep are included.
    """
    return _Decision(census, limits, frozenset(), NOTHING).stages()


class _Decision:
    def __init__(self, census: Inventory, limits: RetentionLimits, doomed: Set[str], stuck: Mapping[str, str]) -> None:
        self._census = census
        self._limits = limits
        self._stuck = stuck
        self._doomed = set(doomed)
        self._refs = Counter(digest for item in census.items.values() for digest in item.digests)
        self._ledger = _Ledger()
        for files in _all_files(census):
            self._ledger.start(files)
        self._items: dict[str, Item] = {}
        self._blobs: dict[str, None] = {}
        self._quarantine: dict[Path, None] = {}
        self._kept: dict[str, str] = {}

    def make(self) -> CollectionPlan:
        limits, census = self._limits, self._census
        for name in sorted((limits.named or frozenset()) & census.items.keys()):
            self._drop_item(name)
        if limits.named is None:
            self._drop_garbage()
        order = self._order()
        for name in order:
            if limits.max_age is not None and limits.now - census.items[name].used > limits.max_age:
                self._drop_item(name)
        if limits.max_size is not None and self._ledger.total > limits.max_size:
            for path in census.quarantine:
                self._drop_quarantined(path)
            self._trim(order, limits.max_size)
        freed, linked = 0, 0
        for file, last in self._ledger.gone():
            freed, linked = freed + file.size * last, linked + file.size * (not last)
        waiting = [d for d in census.blobs if not self._refs[d] and d not in self._blobs and not self._is_held(d)]
        return CollectionPlan(
            tuple(self._items), tuple(self._blobs), tuple(self._quarantine), freed, linked, self._ledger.total,
            Counter(self._kept.values()), sum(census.blobs[digest].size for digest in waiting),
        )  # fmt: skip

    def stages(self) -> list[CollectionStage]:
        self._drop_garbage()
        for path in self._census.quarantine:
            self._drop_quarantined(path)
        found = []
        for name in self._order():
            before = self._ledger.total
            if self._drop_item(name):
                found.append(CollectionStage(name, before - self._ledger.total, self._ledger.total))
        return found

    def _drop_garbage(self) -> None:
        for digest in self._census.blobs:
            self._drop_blob(digest)
        for path, files in self._census.quarantine.items():
            if all(abs(self._limits.now - file.changed) > QUARANTINE_SECONDS for file in files):
                self._drop_quarantined(path)

    def _order(self) -> list[str]:
        items = self._census.items
        return sorted(items, key=lambda name: (items[name].used, name))

    def _trim(self, order: list[str], max_size: int) -> None:
        taken = []
        for name in order:
            if self._ledger.total <= max_size:
                break
            if name not in self._items and self._drop_item(name):
                taken.append(name)
        for name in reversed(taken):
            item = self._items[name]
            cost = sum(file.size for file in item.files)
            whole = all(self._refs[digest] > 0 and digest in self._census.blobs for digest in item.digests)
            if whole and not item.folders and self._ledger.total + cost <= max_size:
                self._ledger.add(item.files)
                self._refs.update(item.digests)
                del self._items[name]

    def _drop_item(self, name: str) -> bool:
        item = self._census.items[name]
        if why := self._protection(name, item):
            self._kept[name] = why
            return False
        self._items[name] = item
        self._ledger.drop(item.files)
        self._refs.subtract(item.digests)
        self._doomed |= item.digests
        for digest in sorted(item.digests):
            self._drop_blob(digest)
        return True

    def _protection(self, name: str, item: Item) -> str | None:
        if name in self._census.pinned:
            return "pinned"
        if item.names & self._census.held or (item.folders and self._is_within(item.used, OPENING_SECONDS)):
            return "in use"
        if not self._limits.alone and self._is_within(item.used, self._limits.grace):
            return "used within the grace period"
        return self._stuck.get(name)

    def _drop_blob(self, digest: str) -> None:
        blob = self._census.blobs.get(digest)
        if blob is None or self._refs[digest] or digest in self._stuck or self._is_held(digest):
            return
        if self._is_within(blob.modified, self._limits.grace) and not (self._limits.alone and digest in self._doomed):
            return
        self._blobs[digest] = None
        self._ledger.drop([blob])

    def _drop_quarantined(self, path: Path) -> None:
        if path not in self._quarantine and str(path) not in self._stuck:
            self._quarantine[path] = None
            self._ledger.drop(self._census.quarantine[path])

    def _is_held(self, digest: str) -> bool:
        return blob_name(digest) in self._census.held

    def _is_within(self, moment: float, seconds: float) -> bool:
        """Counts in both directions: a clock that was wrong must not keep a file forever."""
        return abs(self._limits.now - moment) < seconds


def _all_files(census: Inventory) -> Iterator[Iterable[File]]:
    yield census.blobs.values()
    for item in census.items.values():
        yield item.files
    yield from census.quarantine.values()
