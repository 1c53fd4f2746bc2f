"""The store: blobs by digest, and entries that say which blobs a key was built into. See layout.py for the
files.

Any number of processes and threads may use one root at once. Whatever is damaged counts as a miss, is put
into quarantine, and is built again; whatever cannot be written is done without.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from llmc.artifacts.blobs import Blob, BlobMissingError, BlobWriter
from llmc.artifacts.care import Report, Usage, usage, verify
from llmc.artifacts.entries import Entry
from llmc.artifacts.key import Difference, Key
from llmc.artifacts.locks import exclusive
from llmc.artifacts.log import logger
from llmc.artifacts.publish import UnwritableError
from llmc.artifacts.workspace import Area, Workspace, workspace
from llmc.errors import ArtifactError, CapacityError

Build = Callable[[Workspace], Mapping[str, Blob]]
SHORTEST_PREFIX = 4
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


class Store:
    """A content-addressed store in a folder, which need not exist before something is put into it.

    `overflow` is a folder for results that the store has no room for, kept when the process ends and shared
    by processes that name it (workers of one compile, for instance); without it each process makes a
    temporary one when it must, and removes it at exit. A pickled store takes its overflow along. `counters`
    holds hits, misses and corrupt, since this object was made.
    """

    def __init__(self, root: str | Path, *, overflow: str | Path | None = None) -> None:
        self._main = Area(root)
        self._spilled = None if overflow is None else Area(overflow)
        self._spilling = threading.Lock()
        self._hits = 0
        self._misses = 0

    @property
    def root(self) -> Path:
        """The folder, absolute."""
        return self._main.layout.root

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[Path, Path | None]]:
        return _reopen, (self.root, None if self._spilled is None else self._spilled.layout.root)

    @property
    def counters(self) -> dict[str, int]:
        """How often a lookup found its key, did not, and how many damaged files were met."""
        corrupt = sum(area.blobs.corrupt + area.entries.corrupt for area in self._areas)
        return {"hits": self._hits, "misses": self._misses, "corrupt": corrupt}

    # Blobs

    def put_bytes(self, data: bytes | bytearray | memoryview) -> Blob:
        """Store bytes. Raises CapacityError or UnwritableError, with nothing left behind."""
        return self._main.blobs.put_bytes(data)

    def put_file(self, path: str | Path, *, move: bool = False) -> Blob:
        """Store a file's content; `move` consumes the file, without a copy within one file system.

        Raises CapacityError or UnwritableError as `put_bytes`, and ArtifactError when the file cannot be
        read.
        """
        return self._main.blobs.put_file(path, move=move)

    def writer(self) -> AbstractContextManager[BlobWriter]:
        """`with store.writer() as stream: stream.write(…)`; then `stream.blob`, if the block ended well."""
        return self._main.blobs.writer()

    def get_bytes(self, digest: str) -> bytes:
        """A blob's content, its digest verified. Raises BlobMissingError when it is missing or damaged."""
        for area in self._areas:
            if (data := area.blobs.read(digest)) is not None:
                return data
        raise self._missing(digest)

    def path(self, blob: Blob | str, *, verify: bool = True) -> Path:
        """The file of a blob: size verified when a Blob is given, and digest unless verified before and
        untouched since.

        The file is read-only and shared; never write to it. Raises BlobMissingError when it is missing or
        damaged.
        """
        digest, size = (blob, None) if isinstance(blob, str) else blob
        if found := self._find_blob(digest, size, verify):
            return found
        raise self._missing(digest)

    def has(self, blob: Blob) -> bool:
        """Whether the blob is there, by its size."""
        return self._find_blob(*blob, verify=False) is not None

    # Entries

    def lookup(self, key: Key, *, verify: bool = False) -> Entry | None:
        """The entry of a key, all of its blobs present with the right size, and digest too if `verify`; else
        None.

        A damaged entry, or one with a damaged blob, is put into quarantine and is a miss. With the logger
        "llmc.artifacts" at INFO, a miss names the components that differ from the nearest entry.
        """
        entry = self._find_entry(key, verify)
        if entry is not None:
            self._hit(entry)
            return entry
        self._misses += 1
        log = logger()
        from logging import INFO

        if log.isEnabledFor(INFO):
            log.info("miss %s %s: %s", key.kind, key.short, self._why(key))
        return None

    def nearest(self, key: Key) -> tuple[Entry, list[Difference]] | None:
        """Of the 64 entries of this kind used last, the one most like `key`, and `key.explain` of it."""
        return self._main.entries.nearest(key)

    def publish(self, key: Key, outputs: Mapping[str, Blob], meta: Mapping[str, Any] | None = None) -> Entry:
        """Say what a key was built into, atomically; replaces what was said before.

        Raises BlobMissingError for an output that is not in the store, ValueError or TypeError for `meta`
        that is not JSON, CapacityError or UnwritableError where the entry cannot be written.
        """
        self._require(outputs)
        return self._main.entries.write(key, outputs, meta or {})

    def get_or_build(self, key: Key, build: Build) -> tuple[Entry, bool]:
        """The entry of a key, built if need be, and whether it was there: every output is intact, by digest.

        Processes that want one key at once build it once, the others wait; if the holder dies the next one
        builds; where locks do nothing each builds, with the same result. Whatever `build` raises is passed on
        and leaves nothing. A store without room, or one that cannot be written, does not fail the build: a
        warning is logged and the result lives in a temporary folder, known to this object only. CapacityError
        is raised when there is no room for that either. `build` may be run a second time, in another folder,
        when the disk was full under its first.
        """
        entry = self.lookup(key, verify=True)
        if entry is not None:
            return entry, True
        log = logger()

        def waiting() -> None:
            log.info("waiting for another process that builds %s %s", key.kind, key.short)

        with exclusive(self._main.layout.lock(key.kind, key.hex), waiting):
            entry = self._find_entry(key, verify=True)
            if entry is not None:
                self._hit(entry)
                return entry, True
            return self._build(key, build), False

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Every sound entry (of a kind), by kind and then last use, newest first. Blobs are not looked at."""
        return sorted(self._main.entries.all(kind), key=lambda entry: (entry.key.kind, -entry.used))

    def find(self, prefix: str) -> Entry:
        """The entry whose key digest starts with `prefix` (with or without "sha256:"; 4 digits at least).

        Raises ArtifactError when there is none or more than one.
        """
        digits = prefix.removeprefix("sha256:").lower()
        if len(digits) < SHORTEST_PREFIX:
            raise ArtifactError(f"key {prefix!r} is too short: give {SHORTEST_PREFIX} digits or more")
        found = [entry for entry in self.entries() if entry.key.hex.startswith(digits)]
        if not found:
            raise ArtifactError(f"no entry with key {prefix} in {self.root}; `llmc cache ls` lists them")
        if len(found) > 1:
            keys = ", ".join(entry.key.short for entry in found[:8])
            raise ArtifactError(f"key {prefix} is ambiguous in {self.root}: {keys}; give more digits")
        return found[0]

    # Care

    def verify(self, progress: Callable[[str, int], None] | None = None) -> Report:
        """Read every blob and entry; what is damaged goes into quarantine.

        `progress(digest, size)` is called after each blob. Stamps are not believed here: this finds damage
        below the file system too. Remains of crashed processes are removed.
        """
        return verify(self._main, progress)

    def usage(self) -> Usage:
        """What the store holds, by its files' sizes."""
        return usage(self._main.layout)

    # Private

    @property
    def _areas(self) -> list[Area]:
        return [self._main] if self._spilled is None else [self._main, self._spilled]

    def _find_blob(self, digest: str, size: int | None, verify: bool) -> Path | None:
        for area in self._areas:
            if found := area.blobs.find(digest, size, verify=verify):
                return found
        return None

    def _find_entry(self, key: Key, verify: bool) -> Entry | None:
        for area in self._areas:
            entry = area.entries.read(key)
            if entry is None:
                continue
            lost = self._lost(entry.outputs, verify)
            if lost is None:
                area.entries.touch(key)
                return entry
            area.entries.reject(key, f"blob of {lost!r} is missing or damaged")
        return None

    def _lost(self, outputs: Mapping[str, Blob], verify: bool = False) -> str | None:
        """Name of the first output whose blob is missing or damaged."""
        lost = (name for name, blob in outputs.items() if not self._find_blob(*blob, verify=verify))
        return next(lost, None)

    def _require(self, outputs: Mapping[str, Blob]) -> None:
        if (lost := self._lost(outputs)) is not None:
            raise BlobMissingError(f"output {lost!r} is not in {self.root}: store it before the key")

    def _missing(self, digest: str) -> BlobMissingError:
        return BlobMissingError(f"{digest} is missing from {self.root}, or was damaged and put aside; compile again")

    def _hit(self, entry: Entry) -> None:
        self._hits += 1
        logger().debug("hit %s %s", entry.key.kind, entry.key.short)

    def _why(self, key: Key) -> str:
        near = self.nearest(key)
        if near is None:
            return f"nothing of kind {key.kind} is stored"
        entry, found = near
        changes = ", ".join(f"{name}: {theirs} → {mine}" for name, mine, theirs in found)
        return f"nearest is {entry.key.short}; {changes}"

    def _build(self, key: Key, build: Build) -> Entry:
        try:
            return self._build_in(self._main, key, build)
        except (CapacityError, UnwritableError) as error:
            reason: Exception = error
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            reason = error
        area = self._spill(reason)
        try:
            return self._build_in(area, key, build)
        except UnwritableError as error:
            raise CapacityError(f"no room for results: {reason}; nor beside the store: {error}") from error
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise CapacityError(
                f"no room to compile: {reason}; nor in {area.layout.root}: {error}; free some space"
            ) from error

    def _build_in(self, area: Area, key: Key, build: Build) -> Entry:
        with workspace(area, self._spill) as space:
            outputs, meta = dict(build(space)), space.meta
        self._require(outputs)
        try:
            if all(area.blobs.find(*blob, verify=False) for blob in outputs.values()):
                return area.entries.write(key, outputs, meta)
        except (CapacityError, UnwritableError) as error:
            return self._spill(error).entries.write(key, outputs, meta)
        return self._spill(None).entries.write(key, outputs, meta)

    def _spill(self, reason: Exception | None) -> Area:
        """The area for results that the store has no room for. Raises CapacityError where there is none."""
        with self._spilling:
            if self._spilled is None:
                import shutil
                import tempfile

                try:
                    folder = tempfile.mkdtemp(prefix="llmc-uncached-")
                except OSError as error:
                    raise CapacityError(
                        f"no room for results: {reason}; nor for a temporary folder: {error}"
                    ) from error
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                self._spilled = Area(folder)
                logger().warning("results are not cached but kept in %s for now: %s", folder, str(reason))
            return self._spilled


def _reopen(root: Path, overflow: Path | None) -> Store:
    return Store(root, overflow=overflow)
