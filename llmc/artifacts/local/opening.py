"""Opens the store of this user, as the settings describe it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmc.artifacts.bundle.stored import KIND
from llmc.artifacts.bundle.trust import code_of_entry
from llmc.artifacts.log import logger
from llmc.artifacts.ownership import Exposed, exposed, owners
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError

if TYPE_CHECKING:
    from llmc.artifacts.key import Key
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Area, Upstream
    from llmc.settings import Settings


class OwnLocations(NamedTuple):
    """Refuses native code of stores that users other than this one, root and a shared store's owner can change.

    Stores in one of the folders `trusted` are not checked (ownership.py).
    """

    trusted: tuple[str, ...]

    def require(self, key: Key, entry: Entry | None, layouts: Sequence[Layout]) -> None:
        """Raise ArtifactError for native code in an exposed store.

        Skips this host's notes, which hold no code, and bundles, which are checked when they are opened.
        """
        if key.is_local or key.kind == KIND or code_of_entry(key, {} if entry is None else entry.meta) is None:
            return
        blobs = [] if entry is None else [blob.digest for blob in entry.outputs.values()]
        for layout in layouts:
            if (found := self.exposed(layout, [layout.entry(key.kind, key.hex), *map(layout.blob, blobs)])) is not None:
                raise ArtifactError(
                    f"{layout.root}: no native code is used from this store, since others may change it: {found}; "
                    f"{found.remedy}"
                )

    def exposed(self, layout: Layout, files: Sequence[Path] = ()) -> Exposed | None:
        """Return what others can change of a store, or of some of its files; None if nothing."""
        users = owners([layout.root]) if layout.read_only else ()
        return exposed(layout.base, files, users=users, trusted=self.trusted)


class _AtFirstMiss:
    """The upstream of LLMC_REMOTE_CACHE; its dependencies are imported at the first fetch."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._upstream: Upstream | None = None
        self._lock = threading.Lock()

    def fetch(self, key: Key, area: Area) -> Entry | None:
        with self._lock:
            if self._upstream is None:
                from llmc.artifacts.remotes.read_through import connect

                self._upstream = connect(self._settings)
        return self._upstream.fetch(key, area)


def open_store(cache_dir: str | Path | None, settings: Settings, device: str | None = None) -> Store:
    """Open the store in `cache_dir` (default: from the settings), with the settings' shared stores and remote.

    `device` is the compile target, if known: the settings may have a store for it. Native code is refused where others
    can change it (`OwnLocations`).
    """
    upstream = _AtFirstMiss(settings) if settings.remote_cache else None
    root, guard = cache_dir or settings.cache_dir_for(device), OwnLocations(settings.trusted_folders)
    store = Store(root, shared=settings.shared_caches, upstream=upstream, guard=guard)
    _warn_of_writers(store.root, False, guard)
    for folder in settings.shared_caches:
        _warn_of_writers(Path(folder), True, guard)
    return store


@cache
def _warn_of_writers(root: Path, shared: bool, guard: OwnLocations) -> None:
    if (found := guard.exposed(layout := Layout(root, read_only=shared))) is not None:
        logger().warning(
            "%s: others may change this store, so native code is not used from it: %s; %s", layout.root, found,
            found.remedy,
        )  # fmt: skip
