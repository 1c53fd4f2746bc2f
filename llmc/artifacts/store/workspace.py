"""Folders with the layout of a store, a build's workspace in one, and the contracts of a remote tier and a guard."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmc.artifacts.atomic_write import UnwritableError, make_folder, temporary_name, writing
from llmc.artifacts.digest import Blob
from llmc.artifacts.flock import locked_folder
from llmc.artifacts.log import logger
from llmc.artifacts.store.blob_writer import BlobWriter
from llmc.artifacts.store.blobs import REMEDY, Blobs
from llmc.artifacts.store.entries import Entries
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.leases import Lease, blob_name
from llmc.artifacts.temporaries import temporary_folder
from llmc.artifacts.verified_files import VerifiedFiles
from llmc.errors import CapacityError

if TYPE_CHECKING:
    from llmc.artifacts.key import Key
    from llmc.artifacts.store.entries import Entry


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
    with writing(temporaries, 0, REMEDY):
        make_folder(temporaries)
        folder, fd = locked_folder(partial(_built_in, temporaries))
    try:
        yield Workspace(area, folder, spill)
    finally:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _built_in(temporaries: Path) -> Path:
    folder = temporary_name(temporaries)
    os.mkdir(folder)  # noqa: PTH102
    return folder


class Upstream(Protocol):
    """A remote tier that a store asks before it builds (see remotes/read_through.py)."""

    def fetch(self, key: Key, area: Area) -> Entry | None:
        """Return the entry of `key`, verified, trusted, and with all of its blobs added to `area`, or None.

        Never raises because the remote is unavailable, wrong or not trusted: that is logged and is a miss. Raises
        CapacityError or UnwritableError if `area` has no room.
        """
        ...


class Guard(Protocol):
    """Decides whether a store may be used for a result (see local/opening.py). It is pickled with the store."""

    def require(self, key: Key, entry: Entry | None, layouts: Sequence[Layout]) -> None:
        """Raise ArtifactError if the present or future result of `key` may not be used from any of the stores.

        `entry` is the entry found; None before a lookup.
        """
        ...
