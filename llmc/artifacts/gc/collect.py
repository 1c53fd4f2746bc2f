"""Garbage collection in a store while others read and write it.

Each round holds the publish lock (publish_lock.py), decides anew, and then removes what the plan names:

    1. move entries and bundle folders to "tmp/"            from here on nobody finds them
    2. read leases and pins again                           move back what they name by now
    3. read leases and entries again, and move blobs that nothing names to "tmp/"
    4. read leases and entries again                        move back what they name by now
    5. remove what was moved

A user of a file first notes its name in a lease, and then checks that the file exists. So either the user or the
collection sees the other, with or without the lock. Without the lock, a file may be missing briefly between 3 and 4
(see lookup.py). A process killed at any point leaves a sound store: entries go before their blobs, and the next
collection sweeps "tmp/".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.atomic_write import make_folder, temporary_name
from llmc.artifacts.gc.gc_policy import CollectionPlan, RetentionLimits, decide, size_of
from llmc.artifacts.gc.inventory import Counter, Inventory
from llmc.artifacts.store.layout import Layout, put_back
from llmc.artifacts.store.leases import blob_of, in_use
from llmc.artifacts.store.orphans import Remover, sweep
from llmc.artifacts.store.pins import pins
from llmc.artifacts.store.publish_lock import clock, is_of_one_machine, keeps_all_out, publish_lock
from llmc.paths import is_dir

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
        self._counter = Counter(layout)
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
        plan = decide(census, self._limits(now, is_of_one_machine(self._layout)))
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
        """Move blobs away, except those that are needed before or after the move."""
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
