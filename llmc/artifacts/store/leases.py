"""What protects results from collection: leases of living processes, and pins.

    lease   = "leases/" 24 hex                      flock held as long as the process uses what it names
    content = "host " id ( LF name )*               id: of the running kernel, as locks may not reach other machines
    name    = "entries/" kind "/" 64 hex | "blobs/" 64 hex | "bundles/" 16 to 64 hex

A lease counts while its lock is held. Where that is unknown (no locks, or another machine whose locks may not reach
here), it counts for LEASE_SECONDS after it was last written. A process notes a name before it checks that the file
exists. A collection reads the names after it has moved files away (gc.py).

    pin = "pins/" kind "-" 64 hex        empty; its name says which entry, its mtime since when

A pinned entry stays regardless of the limits. A pin may outlive its entry (damaged, or removed by hand): a result built
again under that key is pinned again.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.atomic_write import (
    create_exclusive,
    discard,
    make_folder,
    sync_folder,
    temporary_name,
    write_all,
    writing,
)
from llmc.artifacts.digest import PREFIX, open_regular, parse
from llmc.artifacts.flock import flock, probe
from llmc.artifacts.key import Key, is_kind
from llmc.artifacts.log import logger
from llmc.artifacts.store.layout import HEX, Layout, scan
from llmc.artifacts.store.locks import REMEDY, publish_lock
from llmc.errors import ArtifactError

LEASE_SECONDS = 3600.0
RENEW_SECONDS = 600.0
ATTEMPTS = 20
MAX_BYTES = 16 << 20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"(?:entries/[a-z0-9][a-z0-9_-]{0,63}/[0-9a-f]{64}|blobs/[0-9a-f]{64}|bundles/[0-9a-f]{16,64})")


def entry_name(key: Key) -> str:
    """Return the lease name of an entry."""
    return name_of_entry(key.kind, key.hex)


def name_of_entry(kind: str, hex_digest: str) -> str:
    """Return `entry_name` from a key's kind and digits."""
    return f"entries/{kind}/{hex_digest}"


def blob_name(digest: str) -> str:
    """Return the lease name of a blob. Raises ValueError for an invalid digest."""
    return f"blobs/{parse(digest)}"


def blob_of(name: str) -> str | None:
    """Return the digest of the blob with this lease name; None for what is not a blob."""
    return PREFIX + name.removeprefix("blobs/") if name.startswith("blobs/") else None


def bundle_name(folder: Path) -> str:
    """Return the lease name of a bundle folder in the store."""
    return f"bundles/{folder.name}"


class Lease:
    """A lease on items of one store, by name, until `release` or the end of this object or process.

    The first name creates the file. If it cannot be created, nothing is raised and nothing is protected, as in a store
    that is only read. Safe for threads; a forked process gets a lease of its own.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._names: dict[str, None] = {}
        self._mutex = threading.Lock()
        self._fd: int | None = None
        self._drop: weakref.finalize[..., Lease] | None = None
        self._owner = 0
        self._renewed = 0.0

    def hold(self, *names: str) -> bool:
        """Note names; return whether any of them may have been unprotected until now."""
        if self._layout.read_only:
            return False
        with self._mutex:
            fresh = [name for name in names if name not in self._names]
            lost = self._fd is not None and not self._is_sound(self._fd)
            self._names.update(dict.fromkeys(fresh))
            if fresh or lost:
                self._note(fresh, lost)
            elif self._fd is not None and time.monotonic() - self._renewed > RENEW_SECONDS:
                with suppress(OSError):
                    os.utime(self._fd)
                self._renewed = time.monotonic()
            return bool(fresh) or lost

    def claim(self, names: Iterable[str], there: Callable[[], bool]) -> bool:
        """Note that items are in use; return whether they exist. If so, they stay until this lease ends.

        If nothing can be noted (a read-only store), the answer holds only for now.
        """
        wanted = list(names)
        if self._keeps(wanted):
            return there()
        with publish_lock(self._layout):
            self.hold(*wanted)
            return there()

    def _keeps(self, names: list[str]) -> bool:
        with self._mutex:
            return (
                self._fd is not None
                and self._is_sound(self._fd)
                and time.monotonic() - self._renewed <= RENEW_SECONDS
                and all(name in self._names for name in names)
            )

    def claim_blob(self, digest: str) -> bool:
        """Call `claim` for a blob. Raises ValueError for an invalid digest."""
        return self.claim([blob_name(digest)], self._layout.blob(digest).exists)

    def holds_blob(self, digest: str) -> bool:
        """Whether a blob is noted."""
        return blob_name(digest) in self._names

    def release(self) -> None:
        """Forget all names."""
        with self._mutex:
            self._names.clear()
            self._close()

    def _note(self, fresh: list[str], lost: bool) -> None:
        new = self._fd is None or lost
        try:
            if new:
                self._close()
                fresh = list(self._names)
                self._open()
            if self._fd is not None:
                text = "".join(f"\n{name}" for name in fresh)
                write_all(self._fd, f"host {_host()}{text}".encode() if new else text.encode())
                self._renewed = time.monotonic()
        except OSError as error:
            if new:
                self._close()
            logger().debug("no lease in %s (%s): continuing without", self._layout.leases, error)

    def _is_sound(self, fd: int) -> bool:
        return self._owner == os.getpid() and os.fstat(fd).st_nlink > 0

    def _open(self) -> None:
        make_folder(self._layout.leases)
        for _ in range(ATTEMPTS):
            path = temporary_name(self._layout.leases)
            fd = create_exclusive(path)
            if flock(fd) is not False and os.fstat(fd).st_nlink > 0:
                self._fd, self._owner = fd, os.getpid()
                self._drop = weakref.finalize(self, _remove, fd, path, self._owner)
                return
            os.close(fd)  # a sweep came first
            discard(path)

    def _close(self) -> None:
        if self._drop is not None:
            self._drop()
        self._drop = self._fd = None


def _remove(fd: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:
        discard(path)
    os.close(fd)


def lease_of_bundle(folder: Path) -> Lease | None:
    """Return a lease on a bundle folder inside a store, marked as used now; None for other folders.

    The caller must check afterwards that the folder exists.
    """
    location = Path(os.path.abspath(folder))  # noqa: PTH100 - links are the user's business
    if len(location.parents) < 3:
        return None
    layout = Layout(location.parents[2])
    if location.parent != layout.bundles or not layout.base.is_dir() or not _NAME.fullmatch(bundle_name(location)):
        return None
    lease = Lease(layout)
    with publish_lock(layout):
        lease.hold(bundle_name(location))
    with suppress(OSError):
        os.utime(location)
    return lease


def in_use(layout: Layout, now: float | None = None, *, sweep: bool = False) -> set[str]:
    """Return the names on all leases that count at `now` (default: this machine's clock).

    `sweep` removes the other leases.
    """
    moment = time.time() if now is None else now
    found: set[str] = set()
    for item in scan(layout.leases):
        with suppress(OSError):
            found |= _names(Path(item.path), moment, sweep)
    return found


def _names(path: Path, now: float, sweep: bool) -> set[str]:
    with probe(path) as free:
        with open_regular(path) as file:
            age = abs(now - os.fstat(file.fileno()).st_mtime)
            lines = file.read(MAX_BYTES).decode(errors="replace").split("\n")
        known = free is True and lines[0] == f"host {_host()}"
        if free is False or (not known and age < LEASE_SECONDS):
            return {line for line in lines if _NAME.fullmatch(line)}
        if sweep:
            discard(path)
    return set()


def _host() -> str:
    """Identify the running kernel: within it locks reach everybody, and it ends with all of its processes."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename


class Pin(NamedTuple):
    """One pinned entry, by kind and 64 hex digits; `since` in seconds since 1970."""

    kind: str
    hex: str
    since: float

    @property
    def name(self) -> str:
        """The lease name of the entry."""
        return name_of_entry(self.kind, self.hex)


def pin(layout: Layout, key: Key) -> None:
    """Pin the entry of a key, durably; an existing pin stays.

    Raises ArtifactError if the entry is not in the store, CapacityError or UnwritableError if the pin cannot be
    written.
    """
    path = layout.pin(key.kind, key.hex)
    with publish_lock(layout), writing(path, 0, REMEDY):
        make_folder(path.parent)
        with suppress(FileExistsError):
            os.close(create_exclusive(path))
        if not layout.entry(key.kind, key.hex).is_file():
            path.unlink(missing_ok=True)
            raise ArtifactError(f"{layout.root}: no entry {key.kind} {key.short} to pin; `llmc cache ls` lists them")
        sync_folder(path.parent)


def unpin(layout: Layout, found: Pin) -> None:
    """Remove a pin. Raises UnwritableError if that fails."""
    path = layout.pin(found.kind, found.hex)
    with writing(path, 0, REMEDY):
        path.unlink(missing_ok=True)
        sync_folder(path.parent)


def pins(layout: Layout) -> list[Pin]:
    """Return every pin, by kind and key."""
    found = []
    for item in scan(layout.pins):
        kind, _, digits = item.name.rpartition("-")
        if is_kind(kind) and HEX.fullmatch(digits):
            with suppress(OSError):
                found.append(Pin(kind, digits, Path(item.path).stat().st_mtime))
    return sorted(found)
