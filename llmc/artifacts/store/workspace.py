"""Folders with the layout of a store, lookups in several while others collect, and a build's workspace in one."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llmc.artifacts.atomic_write import UnwritableError, make_folder, temporary_name, writing
from llmc.artifacts.digest import Blob
from llmc.artifacts.flock import locked_folder
from llmc.artifacts.key import Key, describe
from llmc.artifacts.log import logger
from llmc.artifacts.store.blobs import REMEDY, Blobs, BlobWriter
from llmc.artifacts.store.entries import Entries, Entry
from llmc.artifacts.store.layout import SCHEMA, Layout, scan
from llmc.artifacts.store.leases import Lease, blob_name, entry_name
from llmc.artifacts.temporaries import temporary_folder
from llmc.artifacts.verified_files import VerifiedFiles
from llmc.errors import CapacityError


class Area:
    """A folder with the layout of a store: the store, a read-only shared one, or the overflow for results.

    `stamps_of` is the area whose table of verified files is used, for an area that cannot be written.
    """

    def __init__(self, root: str | Path, *, stamps_of: Area | None = None) -> None:
        self.layout = Layout(root, read_only=stamps_of is not None)
        self.stamps: VerifiedFiles = VerifiedFiles(self.layout.base) if stamps_of is None else stamps_of.stamps
        self.lease = Lease(self.layout)
        self.blobs = Blobs(self.layout, self.stamps, self.lease.claim_blob)
        self.entries = Entries(self.layout)


class Spill:
    """The overflow of a store: the folder given, which is kept, or a temporary one, created when needed.

    The temporary one is removed with this object; a later process removes what a killed one leaves (temporaries.py).
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._area = None if folder is None else Area(folder)
        self._making = threading.Lock()

    @property
    def areas(self) -> list[Area]:
        """The folder, if it exists by now."""
        return [] if self._area is None else [self._area]

    @property
    def root(self) -> Path | None:
        """The path of the folder, if it exists by now."""
        return None if self._area is None else self._area.layout.root

    def take(self, reason: Exception | None) -> Area:
        """Return the folder, created if needed because of `reason`. Raises CapacityError if it cannot be created."""
        with self._making:
            if self._area is None:
                built = ExitStack()
                try:
                    folder = built.enter_context(temporary_folder("uncached"))
                except OSError as error:
                    raise CapacityError(
                        f"no room for results: {reason}; nor for a temporary folder: {error}"
                    ) from error
                weakref.finalize(self, built.close)
                self._area = Area(folder)
                logger().warning("results are not cached but kept in %s for now: %s", folder, str(reason))
            return self._area


class Workspace:
    """A build's own folder, removed after the build, and its access to the store.

    `meta` (JSON values) is kept with the result. A blob that the store has no room for goes to the overflow, so that a
    build never fails for want of a cache.
    """

    def __init__(self, area: Area, folder: Path, spill: Callable[[Exception], Area]) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = {}
        self._area = area
        self._spill = spill

    def put_bytes(self, data: bytes | bytearray | memoryview) -> Blob:
        """Store `data`. Raises CapacityError if neither store nor overflow has room."""
        return self._put(lambda blobs: blobs.put_bytes(data))

    def put_file(self, path: str | Path, *, move: bool = True) -> Blob:
        """Store a file, consumed by default. Raises CapacityError if neither store nor overflow has room."""
        return self._put(lambda blobs: blobs.put_file(path, move=move))

    def writer(self) -> AbstractContextManager[BlobWriter]:
        """Stream into a blob. Let its CapacityError propagate: the build is run again where there is room."""
        return self._area.blobs.writer()

    def _put(self, put: Callable[[Blobs], Blob]) -> Blob:
        try:
            blob = put(self._area.blobs)
        except (CapacityError, UnwritableError) as error:
            self._area = self._spill(error)
            blob = put(self._area.blobs)
        self._area.lease.hold(blob_name(blob.digest))
        return blob


@contextmanager
def workspace(area: Area, spill: Callable[[Exception], Area]) -> Iterator[Workspace]:
    """Yield a workspace in an area, locked while it lives. Raises CapacityError or UnwritableError."""
    temporaries = area.layout.temporaries

    def make() -> Path:
        path = temporary_name(temporaries)
        path.mkdir()
        return path

    with writing(temporaries, 0, REMEDY):
        make_folder(temporaries)
        folder, fd = locked_folder(make)
    try:
        yield Workspace(area, folder, spill)
    finally:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


class Upstream(Protocol):
    """A remote tier that a store asks before it builds (see remotes/read_through.py)."""

    def fetch(self, key: Key, area: Area) -> Entry | None:
        """Return the entry of `key`, verified, trusted, and with all of its blobs added to `area`, or None.

        Never raises because the remote is unavailable, wrong or not trusted: that is logged and is a miss. Raises
        CapacityError or UnwritableError if `area` has no room.
        """


class Guard(Protocol):
    """Decides whether a store may be used for a result (see local/opening.py). It is pickled with the store."""

    def require(self, key: Key, entry: Entry | None, layouts: Sequence[Layout]) -> None:
        """Raise ArtifactError if the present or future result of `key` may not be used from any of the stores.

        `entry` is the entry found; None before a lookup.
        """


T = TypeVar("T")
_VERSION = re.compile(r"v(0|[1-9][0-9]{0,5})")
PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16)
"""Seconds between attempts to find a missing file: without locks, a collection may put it back a moment later."""


def find_blob(areas: Sequence[Area], digest: str, size: int | None, verify: bool) -> Path | None:
    """Return the file of an intact blob in the first area that has one, or None."""
    return next(filter(None, (area.blobs.find(digest, size, verify=verify) for area in areas)), None)


def claim_blob(areas: Sequence[Area], digest: str, size: int | None, verify: bool) -> Path | None:
    """Return the file of an intact blob, which stays as long as its area's object lives, or None."""
    for area in areas:
        path = area.blobs.find(digest, size, verify=verify)
        if path is not None and area.lease.claim_blob(digest):
            return path
    return None


def insist(areas: Sequence[Area], digest: str, find: Callable[[], T | None]) -> T | None:
    """Call `find` for a blob; retry for one that was claimed before and did not turn out damaged."""
    for pause in (*PAUSES, None):
        damaged = _damaged(areas)
        if (found := find()) is not None:
            return found
        if pause is None or _damaged(areas) != damaged or not any(area.lease.holds_blob(digest) for area in areas):
            return None
        time.sleep(pause)
    return None


def lost_output(outputs: Mapping[str, Blob], areas: Sequence[Area], verify: bool) -> str | None:
    """Return the name of the first output whose blob is missing or damaged, or None."""
    lost = (name for name, (digest, size) in outputs.items() if find_blob(areas, digest, size, verify) is None)
    return next(lost, None)


def find_entry(areas: Sequence[Area], key: Key, verify: bool) -> Entry | None:
    """Return the entry of a key from the first area that has it with all of its blobs, marked as used.

    An entry with a missing blob is quarantined, unless it was collected or published again meanwhile. It also stays if
    a blob could not be read, because that may be temporary.
    """
    for area in areas:
        if key.is_local and area.layout.read_only:
            continue  # it may come from another machine
        if (entry := _find_in(area, areas, key, verify)) is not None:
            return entry
    return None


def _find_in(area: Area, areas: Sequence[Area], key: Key, verify: bool) -> Entry | None:
    for pause in (*PAUSES, None):
        entry = area.entries.read(key)
        if entry is None:
            return None
        damaged, unreadable = _damaged(areas), _unreadable(areas)
        lost = lost_output(entry.outputs, areas, verify)
        if lost is None:
            if area.lease.claim(names_of(entry.key, entry.outputs), partial(_is_there, area, areas, entry)):
                area.entries.touch(key)
                return entry
        elif _unreadable(areas) != unreadable:
            return None
        elif pause is None or _damaged(areas) != damaged:
            area.entries.reject(entry, f"blob of {lost!r} is missing or damaged")
            return None
        time.sleep(pause or 0)
    return None


def names_of(key: Key, outputs: Mapping[str, Blob]) -> list[str]:
    """Return the lease names of an entry and its outputs. Raises ValueError for an invalid digest."""
    return [entry_name(key), *(blob_name(blob.digest) for blob in outputs.values())]


def miss_reason(key: Key, areas: Sequence[Area]) -> str:
    """Explain in one line why no area has `key`; the first area is the store itself.

    The reason is what was wrong with its entry, if it was quarantined just now; otherwise what differs from the nearest
    entry of its kind; otherwise that there is none, and whether the store is new or another version of llmc wrote it.
    """
    for area in areas:
        if (problem := area.entries.problem(key)) is not None:
            return f"its entry was quarantined: {problem}"
    if key.is_local:
        return "not seen on this machine before, or changed since"
    near = [found for area in areas if (found := area.entries.nearest(key)) is not None]
    if near:
        return describe(min(near, key=lambda item: len(item[1]))[1])
    return f"nothing of kind {key.kind} is stored{_newness(areas[0].layout)}"


def _is_there(area: Area, areas: Sequence[Area], entry: Entry) -> bool:
    path = area.layout.entry(entry.key.kind, entry.key.hex)
    return path.exists() and lost_output(entry.outputs, areas, verify=False) is None


def _damaged(areas: Sequence[Area]) -> int:
    return sum(area.blobs.corrupt for area in areas)


def _unreadable(areas: Sequence[Area]) -> int:
    return sum(area.blobs.unreadable for area in areas)


def _newness(layout: Layout) -> str:
    if layout.entries.is_dir():
        return ""
    others = sorted(item.name for item in scan(layout.root) if _VERSION.fullmatch(item.name))
    if others and layout.base.name not in others:
        return f": {layout.root} holds {', '.join(others)} of other versions of llmc, and this one reads v{SCHEMA}"
    return f": the store {layout.root} is new"
