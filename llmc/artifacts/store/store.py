"""The store: blobs by digest, and entries that say which blobs a key was built into. See layout.py for files.

Any number of processes and threads may use one root at once. A damaged file counts as a miss, is quarantined, and is
built again. A result that cannot be written is used uncached.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Difference, Key
from llmc.artifacts.log import logger
from llmc.artifacts.store.audit import AuditReport, StoreUsage, usage, verify
from llmc.artifacts.store.blobs import BlobMissingError, BlobWriter
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.locks import exclusive, publish_lock
from llmc.artifacts.store.workspace import (
    Area,
    Guard,
    Spill,
    Upstream,
    Workspace,
    claim_blob,
    find_blob,
    find_entry,
    insist,
    lost_output,
    miss_reason,
    names_of,
    workspace,
)
from llmc.errors import ArtifactError, CapacityError
from llmc.platforms import require_posix

Build = Callable[[Workspace], Mapping[str, Blob]]
SHORTEST_PREFIX = 4
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


class _GoneError(BlobMissingError):
    """A build's blob is missing when its entry is published."""


class Store:
    """A content-addressed store in a folder, which need not exist before something is stored.

    `shared` are further stores that are only read, in this order and in place (a read-only network mount, for
    instance): nothing is copied from them, moved in them, or locked there. `upstream` is asked, before a build, for
    what none of them has.

    `overflow` is a folder for results that the store has no room for. It is kept when the process ends, and shared by
    processes that name it (workers of one compile, for instance). Without it, each process creates a temporary one when
    needed, and removes it at exit. A pickled store keeps its overflow and its shared stores. `guard` is called before a
    lookup, and for the result found. What this object found, fetched or published is not collected while it lives
    (leases.py). `counters` holds hits, misses, fetched (hits that came from upstream) and corrupt, since this object
    was created.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        overflow: str | Path | None = None,
        shared: Sequence[str | Path] = (),
        upstream: Upstream | None = None,
        guard: Guard | None = None,
    ) -> None:
        require_posix()
        self._main = Area(root)
        self.layout = self._main.layout
        self.root = self.layout.root  # absolute
        self._shared = [Area(folder, stamps_of=self._main) for folder in shared]
        self._guard = guard
        self._upstream = upstream
        self._fetched = 0
        self._overflow = Spill(overflow)
        self._hits = 0
        self._misses = 0

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[Any, ...]]:
        return _reopen, (self.root, self._overflow.root, [area.layout.root for area in self._shared], self._guard)

    @property
    def counters(self) -> dict[str, int]:
        """The number of hits, misses, hits fetched from upstream, and damaged files found."""
        corrupt = sum(area.blobs.corrupt + area.entries.corrupt for area in self._areas)
        return {"hits": self._hits, "misses": self._misses, "fetched": self._fetched, "corrupt": corrupt}

    def put_bytes(self, data: bytes | bytearray | memoryview) -> Blob:
        """Store bytes. Raises CapacityError or UnwritableError, with nothing left behind."""
        return self._main.blobs.put_bytes(data)

    def put_file(self, path: str | Path, *, move: bool = False, link: bool = False) -> Blob:
        """Store a file's content; `move` consumes the file, `link` shares a read-only one.

        Within one file system, `move` does not copy. Raises CapacityError or UnwritableError as `put_bytes` does, and
        ArtifactError if the file cannot be read.
        """
        return self._main.blobs.put_file(path, move=move, link=link)

    def writer(self) -> AbstractContextManager[BlobWriter]:
        """Stream into a blob: `with store.writer() as stream: stream.write(…)`, then `stream.blob`."""
        return self._main.blobs.writer()

    def get_bytes(self, digest: str) -> bytes:
        """Return a blob's content, verified by digest. Raises BlobMissingError if it is missing or damaged."""

        def read() -> bytes | None:
            return next((data for area in self._areas if (data := area.blobs.read(digest)) is not None), None)

        if (data := insist(self._areas, digest, read)) is not None:
            return data
        raise self._missing(digest)

    def path(self, blob: Blob | str, *, verify: bool = True) -> Path:
        """Return the file of a blob, verified by size (for a Blob) and by digest or valid stamp.

        The file is read-only and shared; never write to it. Raises BlobMissingError if it is missing or damaged.
        """
        digest, size = (blob, None) if isinstance(blob, str) else blob
        if found := insist(self._areas, digest, lambda: claim_blob(self._areas, digest, size, verify)):
            return found
        raise self._missing(digest)

    def has(self, blob: Blob) -> bool:
        """Whether the blob exists, by its size; if so, it stays."""
        return self.locate(blob) is not None

    def locate(self, blob: Blob) -> Path | None:
        """Return the file of an existing blob, by its size, or None; if it exists, it stays."""
        return claim_blob(self._areas, *blob, verify=False)

    def hold(self, *names: str) -> None:
        """Protect items, by lease name (leases.py), from collection as long as this object lives."""
        self._main.lease.hold(*names)

    def is_intact(self, blob: Blob) -> bool:
        """Whether the blob exists, by its digest; if so, it stays."""
        return claim_blob(self._areas, *blob, verify=True) is not None

    def lookup(self, key: Key, *, verify: bool = False) -> Entry | None:
        """Return the entry of a key if all of its blobs exist with the right size, and digest if `verify`, or None.

        A damaged entry, or one with a damaged blob, is quarantined and is a miss. With the logger "llmc.artifacts" at
        INFO, a miss names the components that differ from the nearest entry. Raises ArtifactError as the guard does.
        """
        entry = find_entry(self._areas, key, verify)
        if entry is not None:
            self._hit(entry)
            return entry
        self.require_usable(key)
        self._misses += 1
        log = logger()
        from logging import INFO

        if log.isEnabledFor(INFO):
            log.info("miss %s %s: %s", key.kind, key.short, self.why(key))
        return None

    def obtain(self, key: Key) -> Entry | None:
        """Return the entry of a key as `lookup` does, or from upstream."""
        return self.lookup(key) or self._fetch(key)

    def nearest(self, key: Key) -> tuple[Entry, list[Difference]] | None:
        """Return the last used entry of this kind that is most like `key`, and their differences (see entries.py)."""
        return self._main.entries.nearest(key)

    def why(self, key: Key) -> str:
        """Explain in one line, as `theirs → mine`, why a lookup did not find `key` (see `miss_reason`)."""
        return miss_reason(key, self._areas)

    def publish(
        self, key: Key, outputs: Mapping[str, Blob], meta: Mapping[str, Any] | None = None,
        created: float | None = None,
    ) -> Entry:  # fmt: skip
        """Record what a key was built into, atomically; replaces an existing entry.

        `created` is the recorded time, in seconds since 1970 (default: now). Raises BlobMissingError for an output that
        is not in the store, ValueError or TypeError if `meta` is not JSON, CapacityError or UnwritableError if the
        entry cannot be written.
        """
        with publish_lock(self.layout):
            self._require(key, outputs, [self._main, *self._shared])
            return self._main.entries.write(key, outputs, meta or {}, created)

    def get_or_build(self, key: Key, build: Build) -> tuple[Entry, bool]:
        """Return the entry of a key, built if needed, and whether it existed; every output is intact, by digest.

        Processes that request one key at once build it once, and the others wait. If the holder dies, the next one
        builds. Where locks do nothing, each builds, with the same result. Whatever `build` raises is passed on and
        leaves nothing. A store without room, or one that cannot be written, does not fail the build: a warning is
        logged and the result lives in a temporary folder, known only to this object. CapacityError is raised if there
        is no room there either. `build` may be run a second time: in another folder, if the disk was full under its
        first, and if what its first stored was removed before it was published.
        """
        entry = self.lookup(key, verify=True)
        if entry is not None:
            return entry, True
        log = logger()

        def waiting() -> None:
            log.info("waiting for another process that builds %s %s", key.kind, key.short)

        with exclusive(self.layout.lock(key.kind, key.hex), waiting):
            entry = find_entry(self._areas, key, verify=True)
            if entry is not None:
                self._hit(entry)
                return entry, True
            entry = self._fetch(key)
            if entry is not None:
                return entry, True
            try:
                return self.build(key, build), False
            except _GoneError as error:
                log.info("building %s %s again: %s", key.kind, key.short, error)
                return self.build(key, build), False

    def build(self, key: Key, build: Build) -> Entry:
        """Build a missing key as `get_or_build` does, without waiting for anybody else who builds it."""
        try:
            return self._build_in(self._main, key, build)
        except (CapacityError, UnwritableError) as error:
            reason: Exception = error
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            reason = error
        area = self._overflow.take(reason)
        try:
            return self._build_in(area, key, build)
        except UnwritableError as error:
            raise CapacityError(f"no room for results: {reason}; nor outside the store: {error}") from error
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise CapacityError(
                f"no room to compile: {reason}; nor in {area.layout.root}: {error}; free some space"
            ) from error

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Return every sound entry (of a kind), by kind and then last use, newest first. Blobs are not checked."""
        return sorted(self._main.entries.all(kind), key=lambda entry: (entry.key.kind, -entry.used))

    def find(self, prefix: str) -> Entry:
        """Return the entry whose key digest starts with `prefix` (with or without "sha256:"; at least 4 digits).

        Raises ArtifactError if there is none or more than one.
        """
        digits = prefix.removeprefix("sha256:").lower()
        if len(digits) < SHORTEST_PREFIX:
            raise ArtifactError(f"key {prefix!r} is too short: give {SHORTEST_PREFIX} digits or more")
        found = [entry for entry in self.entries() if entry.key.hex.startswith(digits)]
        return the_one(found, f"entry with key {prefix}", f"{self.root}; `llmc cache ls` lists them")

    def verify(self, progress: Callable[[str, int], None] | None = None) -> AuditReport:
        """Read every blob and entry; damaged ones are quarantined.

        `progress(digest, size)` is called after each blob. Stamps are ignored, so damage below the file system is found
        too. Leftovers of crashed processes are removed.
        """
        return verify(self._areas, progress)

    def usage(self) -> StoreUsage:
        """Return the files and bytes in the store."""
        return usage(self.layout)

    @property
    def _areas(self) -> list[Area]:
        return [self._main, *self._overflow.areas, *self._shared]

    def _require(self, key: Key, outputs: Mapping[str, Blob], areas: Sequence[Area]) -> None:
        """Protect an entry to be published and its outputs. Raises _GoneError if an output is missing."""
        self.hold(*names_of(key, outputs))
        if (lost := lost_output(outputs, areas, verify=False)) is not None:
            raise _GoneError(f"output {lost!r} is not in {self.root}: store it before the key")

    def _missing(self, digest: str) -> BlobMissingError:
        return BlobMissingError(f"{digest} is missing from {self.root}, or was damaged and quarantined; compile again")

    def require_usable(self, key: Key, entry: Entry | None = None) -> None:
        """Raise ArtifactError if the guard refuses the result of `key`, before any work for it."""
        if self._guard is not None:
            self._guard.require(key, entry, [area.layout for area in (self._main, *self._shared)])

    def _hit(self, entry: Entry) -> None:
        self.require_usable(entry.key, entry)
        self._hits += 1
        logger().debug("hit %s %s", entry.key.kind, entry.key.short)

    def _fetch(self, key: Key) -> Entry | None:
        if self._upstream is None or key.is_local:
            return None
        try:
            entry = self._upstream.fetch(key, self._main)
        except (CapacityError, UnwritableError) as error:
            entry = self._upstream.fetch(key, self._overflow.take(error))
        if entry is not None and (entry := find_entry(self._areas, key, verify=False)) is not None:
            self._hits += 1
            self._fetched += 1
        return entry

    def _build_in(self, area: Area, key: Key, build: Build) -> Entry:
        with workspace(area, self._overflow.take) as space:
            outputs, meta = dict(build(space)), space.meta
        with publish_lock(self.layout):
            self._require(key, outputs, self._areas)
            try:
                if all(find_blob([area, *self._shared], *blob, verify=False) for blob in outputs.values()):
                    return area.entries.write(key, outputs, meta)
            except (CapacityError, UnwritableError) as error:
                return self._overflow.take(error).entries.write(key, outputs, meta)
            return self._overflow.take(None).entries.write(key, outputs, meta)


def the_one(found: Sequence[Entry], name: str, location: str) -> Entry:
    """Return the only one of the entries that match a name. Raises ArtifactError if there is none or more than one."""
    if not found:
        raise ArtifactError(f"no {name} in {location}")
    if len(found) > 1:
        keys = ", ".join(entry.key.short for entry in found[:8])
        raise ArtifactError(f"{name} is ambiguous: {keys}; give more digits")
    return found[0]


def _reopen(root: Path, overflow: Path | None, shared: list[Path], guard: Guard | None) -> Store:
    return Store(root, overflow=overflow, shared=shared, guard=guard)
