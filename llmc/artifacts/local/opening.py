"""The store of this user, as the settings describe it."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.log import logger
from llmc.artifacts.ownership import anybody_writes
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.store import Store

if TYPE_CHECKING:
    from llmc.artifacts.key import Key
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Upstream
    from llmc.artifacts.store.workspace import Area
    from llmc.settings import Settings


class _AtFirstMiss:
    """The upstream of LLMC_REMOTE_CACHE; what it needs is imported when it is first asked."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._upstream: Upstream | None = None
        self._lock = threading.Lock()

    def fetch(self, key: Key, area: Area) -> Entry | None:
        """See store.Upstream."""
        with self._lock:
            if self._upstream is None:
                from llmc.artifacts.remotes.read_through import connect

                self._upstream = connect(self._settings)
        return self._upstream.fetch(key, area)


def open_store(cache_dir: str | Path | None, settings: Settings, device: str | None = None) -> Store:
    """The store in `cache_dir` (None: the settings'), with the shared stores and the remote of the settings.

    `device` is what is compiled for, if that is known: some have a store of their own in the settings.
    """
    upstream = _AtFirstMiss(settings) if settings.remote_cache else None
    store = Store(cache_dir or settings.cache_dir_for(device), shared=settings.shared_caches, upstream=upstream)
    for base in (store.layout.base, *(Layout(folder).base for folder in settings.shared_caches)):
        _warn_of_writers(base)
    return store


@cache
def _warn_of_writers(base: Path) -> None:
    """Say, once, that everybody may put files into a store: code that runs with the rights of those who use it."""
    for folder in (base.parent, base):
        with suppress(OSError):
            if anybody_writes(folder):
                logger().warning(
                    "%s: every user of this machine may put results there, native code too, which runs as whoever uses "
                    "the store; chmod o-w %s", folder, folder,
                )  # fmt: skip
                return
