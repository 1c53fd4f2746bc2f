"""Garbage collection in a store while others read and write it.

An inventory says what there is, a plan says what may go, and a collection removes it. The plan touches no files:

    1. Items last used more than `max_age` ago are removed.
    2. Blobs that no entry names are removed, except those stored within `grace`: a build may be about to publish them.
    3. While there is more than `max_size`: first quarantined files, then the least recently used item.
    4. Of the items chosen in 3, newest first: one whose removal frees only its own small file stays after all, if it
       fits. Other items keep its blobs anyway, and keeping it saves a build.

Pinned and used items stay. A bundle folder that was created or opened within OPENING_SECONDS stays as well: its creator
is about to open it. Sizes count every file once, however many names it has.

Each round of a collection holds the publish lock (store/locks.py), decides anew, and then removes what the plan names:

    1. move entries and bundle folders to "tmp/"            from here on nobody finds them
    2. read leases and pins again                           move back what they name by now
    3. read leases and entries again, and move blobs that nothing names to "tmp/"
    4. read leases and entries again                        move back what they name by now
    5. remove what was moved

A user of a file first notes its name in a lease, and then checks that the file exists. So either the user or the
collection sees the other, with or without the lock. Without the lock, a file may be missing briefly between 3 and 4
(see store/workspace.py). A process killed at any point leaves a sound store: entries go before their blobs, and the
next collection sweeps "tmp/".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from llmc.artifacts.atomic_write import make_folder, temporary_name
from llmc.artifacts.bundle.manifest import FILE_NAME
from llmc.artifacts.bundle.stored import KIND as BUNDLE
from llmc.artifacts.digest import PREFIX, digest_file
from llmc.artifacts.key import Key
from llmc.artifacts.store.audit import Remover, sweep
from llmc.artifacts.store.entries import Entries
from llmc.artifacts.store.layout import File, Layout, file_of, files_of, put_back, scan
from llmc.artifacts.store.leases import blob_name, blob_of, bundle_name, entry_name, in_use, name_of_entry, pins
from llmc.artifacts.store.locks import clock, is_local, keeps_all_out, publish_lock
from llmc.paths import is_dir


class Item(NamedTuple):
    """The unit of use, pinning and collection: an entry with its bundle folders, or a bundle folder without an entry.

    `names` are its names in leases, `files` all files of its entry, if there is one, and its folders.
    """

    names: frozenset[str]
    used: float
    digests: frozenset[str]
    entry: Path | None
    folders: tuple[Path, ...]
    files: tuple[File, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The entry and the folders."""
        return self.folders if self.entry is None else (self.entry, *self.folders)


class Inventory(NamedTuple):
    """Items by name, blobs by digest, quarantined files, and the names that are in use (`held`) and pinned."""

    items: dict[str, Item]
    blobs: dict[str, File]
    quarantine: dict[Path, tuple[File, ...]]
    held: set[str]
    pinned: set[str]


class InventoryTaker:
    """Takes the inventory of one store repeatedly; unchanged files are not read again."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._entries = Entries(layout)
        self._read: dict[str, tuple[File, frozenset[str] | None]] = {}
        self._manifests: dict[Path, tuple[File, str | None]] = {}

    def take(self, now: float, *, sweep: bool = False) -> Inventory:
        """Return the inventory at `now`; `sweep` removes leases of dead processes.

        Leases are read before entries: a process that ended its lease earlier has already published its entry.
        """
        held = in_use(self._layout, now, sweep=sweep)
        items = self._items()
        for folder in scan(self._layout.bundles):
            if folder.is_dir(follow_symlinks=False) and not folder.name.startswith("."):
                self._add_folder(items, Path(folder.path))
        blobs = {}
        for digest, item in self._layout.all_blobs():
            with suppress(OSError):
                blobs[digest] = file_of(item.stat(follow_symlinks=False))
        quarantine = {Path(item.path): tuple(files_of(Path(item.path))) for item in scan(self._layout.quarantine)}
        return Inventory(items, blobs, quarantine, held, {pin.name for pin in pins(self._layout)})

    def _items(self) -> dict[str, Item]:
        items = {}
        for kind, found in self._layout.all_entries():
            name = name_of_entry(kind, found.name[:64])
            with suppress(OSError):
                seen = file_of(found.stat(follow_symlinks=False))
                digests = self._digests(Path(found.path), name, seen)
                if digests is not None:
                    items[name] = Item(frozenset([name]), seen.modified, digests, Path(found.path), (), (seen,))
        return items

    def _digests(self, path: Path, name: str, seen: File) -> frozenset[str] | None:
        known = self._read.get(name)
        if known is None or (known[0].inode, known[0].changed) != (seen.inode, seen.changed):
            entry = self._entries.load(path, PREFIX + path.stem)
            digests = None if entry is None else frozenset(blob.digest for blob in entry.outputs.values())
            known = self._read[name] = seen, digests
        return known[1]

    def _add_folder(self, items: dict[str, Item], folder: Path) -> None:
        try:
            used = folder.stat().st_mtime
        except OSError:
            return
        name = self._entry_of(folder) or bundle_name(folder)
        whole = items.get(name, Item(frozenset(), used, frozenset(), None, (), ()))
        items[name] = whole._replace(
            names=whole.names | {bundle_name(folder)},
            used=max(whole.used, used),
            folders=(*whole.folders, folder),
            files=(*whole.files, *files_of(folder)),
        )

    def _entry_of(self, folder: Path) -> str | None:
        path = folder / FILE_NAME
        try:
            seen = file_of(path.stat())
            known = self._manifests.get(folder)
            if known is None or known[0] != seen:
                known = self._manifests[folder] = seen, entry_name(Key(BUNDLE, {"manifest": digest_file(path)}))
        except OSError:
            return None
        return known[1]


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


GRACE_SECONDS = 3600.0
BATCH = 4000
OPEN_BATCH = 50
UNREMOVABLE = "cannot be removed"
Progress = Callable[[int, int], None]


class Collection(NamedTuple):
    """The result of a collection or a dry run; sizes in bytes.

    `entries`, `bundles` (folders in the store), `blobs` and `others` (temporaries, quarantine, locks) count removed
    items. `freed` bytes were returned to the disk; `linked` bytes stay because of other names, such as bundles outside
    the store. `before` and `after` are the store's size without temporaries, each file counted once. `kept` counts
    items over a limit by the reason they stay. `waiting` bytes may be about to be named by a build. `over` bytes remain
    above the limit. `failed` gives, by path, why something could not be removed.
    """

    entries: int
    bundles: int
    blobs: int
    others: int
    freed: int
    linked: int
    before: int
    after: int
    kept: Mapping[str, int]
    waiting: int
    over: int
    failed: Mapping[str, str]
    dry_run: bool


def collect(
    layout: Layout,
    *,
    max_size: int | None = None,
    max_age: float | None = None,
    grace: float = GRACE_SECONDS,
    named: frozenset[str] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Collection:
    """Remove unneeded files, then the least recently used results until the limits hold (bytes, seconds).

    With `named`, names of items (`leases.entry_name`), only these are removed, and the blobs that no other item names.

    Pinned items and items that a living process uses stay. Blobs that no entry names yet stay for `grace` seconds.
    Others may use the store meanwhile: what they have stays, and what is removed becomes a miss. `progress(done,
    total)` counts removed items. Items that cannot be removed are reported, which is never fatal. Raises
    UnwritableError for a store that cannot be written at all, CapacityError for a full one.
    """
    if not is_dir(layout.base):
        return Collection(0, 0, 0, 0, 0, 0, 0, 0, {}, 0, 0, {}, dry_run)
    if dry_run:
        return _Run(Layout(layout.root, read_only=True), max_size, max_age, grace, named).rehearse()
    return _Run(layout, max_size, max_age, grace, named).perform(clock(layout), progress)


class _Run:
    def __init__(
        self, layout: Layout, max_size: int | None, max_age: float | None, grace: float, named: frozenset[str] | None
    ) -> None:
        self._layout, self._named = layout, named
        self._max_size, self._max_age, self._grace = max_size, max_age, grace
        self._counter = InventoryTaker(layout)
        self._remover = Remover(layout.read_only)
        self._doomed: set[str] = set()
        self._stuck: dict[str, str] = {}
        self._entries = self._bundles = self._blobs = 0

    def rehearse(self) -> Collection:
        import time

        now = time.time()
        sweep(self._layout, self._remover, now)
        others = self._remover.removed
        census = self._counter.take(now)
        plan = decide(census, self._limits(now, is_local(self._layout.base)))
        for name in plan.items:
            for path in census.items[name].paths:
                self._remove(path, path)
        for digest in plan.blobs:
            self._remove(self._layout.blob(digest), self._layout.blob(digest))
        for path in plan.quarantine:
            self._remover.remove(path)
        return self._report(plan, size_of(census), others + len(plan.quarantine))

    def perform(self, now: float, progress: Progress | None) -> Collection:
        sweep(self._layout, self._remover, now)
        make_folder(self._layout.temporaries)
        others = self._remover.removed
        before = None
        done = 0
        while True:
            with publish_lock(self._layout, exclusive=True) as passed:
                census = self._counter.take(now, sweep=True)
                before = size_of(census) if before is None else before
                closed = passed and keeps_all_out(self._layout)
                plan = decide(census, self._limits(now, closed), self._doomed, self._stuck)
                left = len(plan.items) + len(plan.blobs) + len(plan.quarantine)
                if left == 0:
                    break
                batch = BATCH if closed else OPEN_BATCH
                others += self._round(census, plan, now, batch)
            done += min(left, batch)
            if progress is not None:
                progress(done, done + max(0, left - batch))
        _mend_times(census, now, self._grace)
        return self._report(plan, before, others)

    def _limits(self, now: float, alone: bool) -> RetentionLimits:
        return RetentionLimits(self._max_size, self._max_age, self._grace, now, alone, self._named)

    def _report(self, plan: CollectionPlan, before: int, others: int) -> Collection:
        over = 0 if self._max_size is None else max(0, plan.size - self._max_size)
        return Collection(
            self._entries, self._bundles, self._blobs, others, self._remover.freed, self._remover.linked,
            before, plan.size, plan.kept, plan.waiting, over, self._remover.failed, self._remover.dry_run,
        )  # fmt: skip

    def _round(self, census: Inventory, plan: CollectionPlan, now: float, batch: int) -> int:
        """Remove the first part of the plan; return how many quarantined files were removed."""
        names = plan.items[:batch]
        parked = {name: moved for name in names if (moved := self._park(name, census.items[name].paths))}
        held = in_use(self._layout, now) | {pin.name for pin in pins(self._layout)}
        for name in [name for name in parked if census.items[name].names & held]:
            self._put_back(name, parked.pop(name))
        self._doomed.update(digest for name in parked for digest in census.items[name].digests)
        blobs = self._park_blobs(plan.blobs[: batch - len(names)] if len(names) == len(plan.items) else (), now)
        for moved in [*parked.values(), *blobs]:
            for path, temporary in moved:
                self._remove(temporary, path)
        gone = [path for path in plan.quarantine[:batch] if self._remover.remove(path)]
        self._stuck.update((str(path), UNREMOVABLE) for path in set(plan.quarantine[:batch]) - set(gone))
        return len(gone)

    def _park_blobs(self, digests: Sequence[str], now: float) -> list[list[tuple[Path, Path]]]:
        if not digests:
            return []
        needed = _needed(self._counter.take(now))
        self._stuck.update((digest, "put to use meanwhile") for digest in needed.intersection(digests))
        parked = {
            digest: moved
            for digest in digests
            if digest not in needed and (moved := self._park(digest, (self._layout.blob(digest),)))
        }
        needed = _needed(self._counter.take(now))
        for digest in needed.intersection(parked):
            self._put_back(digest, parked.pop(digest))
        return list(parked.values())

    def _park(self, name: str, paths: tuple[Path, ...]) -> list[tuple[Path, Path]]:
        """Move all paths to temporary names, or none; return (old, new) pairs."""
        moved: list[tuple[Path, Path]] = []
        for path in paths:
            temporary = temporary_name(self._layout.temporaries)
            try:
                os.rename(path, temporary)  # noqa: PTH104
            except FileNotFoundError:
                continue
            except OSError as error:
                self._remover.failed[str(path)] = error.strerror or str(error)
                self._put_back(name, moved)
                self._stuck[name] = UNREMOVABLE
                return []
            moved.append((path, temporary))
        return moved

    def _put_back(self, name: str, moved: list[tuple[Path, Path]]) -> None:
        """Undo the moves and do not try them again; files that were created again meanwhile stay."""
        self._stuck[name] = "put to use meanwhile"
        for path, temporary in moved:
            with suppress(OSError):
                put_back(temporary, path)

    def _remove(self, temporary: Path, path: Path) -> None:
        if self._remover.remove(temporary, path):
            self._entries += path.is_relative_to(self._layout.entries)
            self._bundles += path.is_relative_to(self._layout.bundles)
            self._blobs += path.is_relative_to(self._layout.blobs)


def _needed(census: Inventory) -> set[str]:
    held = {digest for name in census.held if (digest := blob_of(name)) is not None}
    return held.union(*(item.digests for item in census.items.values()))


def _mend_times(census: Inventory, now: float, grace: float) -> None:
    """Set last-use times in the future to now, keeping their order, so that these items can age."""
    ahead = sorted((item.used, item.paths) for item in census.items.values() if item.used > now + grace)
    for index, (_, paths) in enumerate(ahead, 1):
        moment = int(now * 1e9) - (len(ahead) - index) * 1000
        for path in paths:
            with suppress(OSError):
                os.utime(path, ns=(moment, moment))
