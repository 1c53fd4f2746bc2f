"""Places with the layout of a store, a build's workspace in one, and what a store is handed: a far tier, a guard."""

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
    """One place with the layout of a store: the store, a shared one that is only read, or the folder of results
    it had no room for.

    `stamps_of` is the area whose table of verified files is used, for an area that cannot be written.
    """

    def __init__(self, root: str | Path, *, stamps_of: Area | None = None) -> None:
        self.layout = Layout(root, read_only=stamps_of is not None)
        self.stamps: VerifiedFiles = VerifiedFiles(self.layout.base) if stamps_of is None else stamps_of.stamps
        self.lease = Lease(self.layout)
        self.blobs = Blobs(self.layout, self.stamps, self.lease.claim_blob)
        self.entries = Entries(self.layout)


class Spill:
    """A folder with the layout of a store: the one given, which is kept, or a temporary one that is made when it is
    needed and removed with this object; what a killed process leaves is removed by a later one (temporaries.py).
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._area = None if folder is None else Area(folder)
        self._making = threading.Lock()

    @property
    def areas(self) -> list[Area]:
        """The folder, if there is one by now."""
        return [] if self._area is None else [self._area]

    @property
    def root(self) -> Path | None:
        """Where it is, if there is one by now."""
        return None if self._area is None else self._area.layout.root

    def take(self, reason: Exception | None) -> Area:
        """The folder, because of what happened in the store. Raises CapacityError where none can be made."""
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
    """A build's own folder, removed after the build, and its door to the store.

    `meta` is kept with the result (JSON values). A blob that the store has no room for goes where uncached
    results are kept, so that a build never fails for want of a cache.
    """

    def __init__(self, area: Area, folder: Path, spill: Callable[[Exception], Area]) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = {}
        self._area = area
        self._spill = spill

    def put_bytes(self, data: bytes | bytearray | memoryview) -> Blob:
        """Store `data`. Raises CapacityError when nothing at all has room for it."""
        return self._put(lambda blobs: blobs.put_bytes(data))

    def put_file(self, path: str | Path, *, move: bool = True) -> Blob:
        """Store a file, consumed by default. Raises CapacityError when nothing at all has room for it."""
        return self._put(lambda blobs: blobs.put_file(path, move=move))

    def writer(self) -> AbstractContextManager[BlobWriter]:
        """Stream into a blob. Let its CapacityError out: the build is run again where there is room."""
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
    """A workspace in an area, locked while it lives. Raises CapacityError or UnwritableError where none can be made."""
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
    """A far tier that a store asks before it builds (see remotes/read_through.py)."""

    def fetch(self, key: Key, area: Area) -> Entry | None:
        """The entry of `key`, verified, trusted, and with all of its blobs put into `area`; else None.

        Never raises because the far side is away, wrong or not trusted: that is logged and is a miss. Raises
        CapacityError or UnwritableError when `area` has no room.
        """
        ...


class Guard(Protocol):
    """Decides whether a store may be used for a result (see local/opening.py). It is pickled with the store."""

    def require(self, key: Key, entry: Entry | None, layouts: Sequence[Layout]) -> None:
        """Raise ArtifactError if what is, or will be, under `key` may not be used from any of the stores.

        `entry` is what was found; None before a search.
        """
        ...
