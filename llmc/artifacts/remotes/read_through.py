"""Read-through: a store that has no entry for a key asks a remote before it builds (see store.workspace.Upstream)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.bundle.trust import Trust
from llmc.artifacts.key import Key
from llmc.artifacts.log import logger
from llmc.artifacts.remotes import open_remote
from llmc.artifacts.remotes.base import JOBS, Remote, entry_name
from llmc.artifacts.remotes.ingest import bring, expect, judge, read_entry, settle
from llmc.artifacts.remotes.mover import Mover, may_be_refused
from llmc.artifacts.remotes.retry import HURRIED
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.workspace import Area
from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.settings import Settings


class RemoteUpstream:
    """An `Upstream` with one remote; safe for threads.

    Once the remote itself fails (unreachable, refusing, package missing), this object does not use it again, so that a
    compile without a network waits once, not once per graph. Damaged or untrusted results are misses. Each of the two
    is logged once as a warning, and later at INFO.
    """

    def __init__(self, open_: Callable[[], Remote], trust: Callable[[], Trust], jobs: int = JOBS) -> None:
        """`open_` and `trust` are called at the first fetch."""
        self._open = open_
        self._make_trust = trust
        self._jobs = jobs
        self._lock = threading.Lock()
        self._ends: tuple[Remote, Trust] | None = None
        self._away = False
        self._complained = False

    def fetch(self, key: Key, area: Area) -> Entry | None:
        """Return the entry of `key` with all of its blobs in `area`; None if the remote fails or has no acceptable one.

        Raises CapacityError or UnwritableError if `area` has no room.
        """
        if self._away:
            return None
        try:
            remote, trust = self._opened()
            return self._fetch(remote, trust, key, area)
        except (ArtifactError, InputError, DeviceError) as error:
            if isinstance(error, UnwritableError):
                raise
            if may_be_refused(error):
                self._complain(key, error)
            else:
                self._give_up(error)
            return None

    def _fetch(self, remote: Remote, trust: Trust, key: Key, area: Area) -> Entry | None:
        entry = read_entry(remote, entry_name(key))
        if entry is None:
            return None
        admission, contents = judge(remote, entry, trust)
        expect(area, [entry])
        lacking = sorted({blob for blob in entry.outputs.values() if area.blobs.find(*blob) is None})
        if len(lacking) == 1:
            bring(area, remote, lacking[0], contents, lambda _: None)
        elif lacking:
            with Mover(min(self._jobs, len(lacking))) as mover:
                for future in [mover.run(bring, area, remote, blob, contents, mover.moved) for blob in lacking]:
                    mover.result(future)
        logger().info("fetched %s %s from %s", key.kind, key.short, remote.url)
        return settle(area, entry, admission, lambda blob: area.blobs.find(*blob, verify=False))

    def _opened(self) -> tuple[Remote, Trust]:
        with self._lock:
            if self._ends is None:
                self._ends = self._open(), self._make_trust()
            return self._ends

    def _complain(self, key: Key, error: Exception) -> None:
        from logging import INFO, WARNING

        with self._lock:
            level, self._complained = INFO if self._complained else WARNING, True
        logger().log(level, "%s %s of the remote store is not used, but built here: %s", key.kind, key.short, error)

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            if self._away:
                return
            self._away = True
        logger().warning("continuing without the remote store: %s", error)


def connect(settings: Settings) -> RemoteUpstream:
    """Return the upstream of LLMC_REMOTE_CACHE, which must be set, trusting what the settings trust."""
    from llmc.artifacts.signing.keyring import Keyring

    url = settings.remote_cache or ""
    return RemoteUpstream(lambda: open_remote(url, HURRIED), lambda: Keyring.from_settings(settings))
