"""Trimming a store while others read and write it.

Each round decides afresh, behind the closed gate (publish_lock.py), and then for whatever is to go:

    1. entries and bundle folders are moved to "tmp/"       from here on nobody finds them
    2. leases and pins are read again                       what is named there by now is moved back
    3. leases and entries are read again, and blobs that are named nowhere are moved to "tmp/"
    4. leases and entries are read again                    what is named there by now is moved back
    5. what was moved is removed

A user of a file first notes its name in a lease, and then checks that the file is there. So either the user or the
collection sees the other, with or without the gate. Without the gate, a file may be missing for the moment between 3
and 4 (see lookup.py). A process killed at any point leaves a sound store: entries go before their blobs, and what lies
in "tmp/" is swept by the next.
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
    """What a collection did, or would do; sizes in bytes.

    Removed were `entries`, `bundles` (folders in the store), `blobs` and `others` (temporaries, quarantine, locks).
    `freed` was given back to the disk, `linked` stays there because other names, such as bundles outside the store,
    hold on to it. `before` and `after` are the store's size without temporaries, each file counted once. `kept` are
    items over a limit by why they stay, `waiting` bytes that a build may be about to name, `over` what is left above
    the limit. `failed` says, by path, what could not be removed.
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
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Collection:
    """Remove unneeded files, and then the least recently used results until the limits (bytes, seconds) hold.

    What is pinned, and what a living process uses, stays; so does for `grace` seconds what no entry names yet. Others
    may use the store meanwhile: what they have been given stays, and what is removed is a miss. `progress(done, total)`
    counts removed things. What cannot be removed is reported, and never fatal; a store that cannot be written at all
    raises UnwritableError, a full one CapacityError.
    """
    if not is_dir(layout.base):
        return Collection(0, 0, 0, 0, 0, 0, 0, 0, {}, 0, 0, {}, dry_run)
    if dry_run:
        return _Run(Layout(layout.root, read_only=True), max_size, max_age, grace).rehearse()
    return _Run(layout, max_size, max_age, grace).perform(clock(layout), progress)


class _Run:
    def __init__(self, layout: Layout, max_size: int | None, max_age: float | None, grace: float) -> None:
        self._layout = layout
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
        return RetentionLimits(self._max_size, self._max_age, self._grace, now, alone)

    def _report(self, plan: CollectionPlan, before: int, others: int) -> Collection:
        over = 0 if self._max_size is None else max(0, plan.size - self._max_size)
        return Collection(
            self._entries, self._bundles, self._blobs, others, self._remover.freed, self._remover.linked,
            before, plan.size, plan.kept, plan.waiting, over, self._remover.failed, self._remover.dry_run,
        )  # fmt: skip

    def _round(self, census: Inventory, plan: CollectionPlan, now: float, batch: int) -> int:
        """Remove the first of the plan; how many files of the quarantine went."""
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
        """Move blobs away that are needed neither before nor after that."""
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
        """Move things out of sight, all or none: where they were, and where they are."""
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
        """Undo the moves, and do not try them again; what has been made again meanwhile stays."""
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
    """The digests that entries or leases name."""
    held = {digest for name in census.held if (digest := blob_of(name)) is not None}
    return held.union(*(item.digests for item in census.items.values()))


def _mend_times(census: Inventory, now: float, grace: float) -> None:
    """Change times of last use in the future to now, in their order, so that these items can grow old."""
    ahead = sorted((item.used, item.paths) for item in census.items.values() if item.used > now + grace)
    for location, (_, paths) in enumerate(ahead, 1):
        moment = int(now * 1e9) - (len(ahead) - location) * 1000
        for path in paths:
            with suppress(OSError):
                os.utime(path, ns=(moment, moment))
