"""Locks between processes: between those who publish and the one who collects, and for each key being built.

The publish lock:

    publishing, or finding something to use     shared: check that all files exist, and note it (entry, lease)
    collecting                                  exclusive: see who uses what, and remove the rest

So a file that was found still exists when its use has been noted. Correctness does not depend on this lock: a process
that cannot have it (read-only, no flock, a holder that was stopped for more than GATE_SECONDS) continues without it.
The order of steps in gc.py is still right then, but something may have to be built again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.atomic_write import create_exclusive, discard, make_folder, temporary_name, writing
from llmc.artifacts.flock import flock, probe
from llmc.artifacts.log import logger
from llmc.artifacts.store.layout import Layout

if TYPE_CHECKING:
    from filelock import BaseFileLock


GATE_SECONDS = 10.0
LONGEST_PAUSE = 0.02
REMEDY = "run this as the user who owns the store"
MOUNTS = Path("/proc/self/mountinfo")
_ONE_MACHINE = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "tmpfs", "ramfs", "overlay"}
)


@contextmanager
def publish_lock(layout: Layout, *, exclusive: bool = False) -> Iterator[bool]:
    """Hold the publish lock of a store; yields False if it is unavailable, and the caller continues without it."""
    fd = None if layout.read_only else _enter(layout.gate, exclusive)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _enter(path: Path, exclusive: bool) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            make_folder(path.parent)
            fd = os.open(path, flags, 0o666)
    except OSError as error:
        logger().debug("no lock file at %s (%s): continuing without", path, error)
        return None
    deadline = time.monotonic() + GATE_SECONDS
    pause = 0.0005
    while (found := flock(fd, shared=not exclusive)) is False and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    if found:
        return fd
    os.close(fd)
    logger().debug("no lock at %s: continuing without", path)
    return None


def keeps_all_out(layout: Layout) -> bool:
    """Whether the exclusive lock that this process holds really excludes everybody.

    False where the kernel grants every lock, or where other machines may have locks of their own.
    """
    try:
        with probe(layout.gate) as found:
            return found is False and is_local(layout.base)
    except OSError:
        return False


def is_local(folder: Path) -> bool:
    """Whether an existing folder is on a file system that only this machine can have mounted; False if unknown.

    There, all see each other's locks. Elsewhere they may not: a network file system can be mounted with locks that stay
    on each machine (`nolock`).
    """
    return _file_system(folder) in _ONE_MACHINE


def _file_system(folder: Path) -> str:
    """Return the type of a folder's file system; "" if the system does not say."""
    location = os.path.realpath(folder)
    best = kind = ""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode().decode("unicode_escape")
        if (location == point or location.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, after.split(" ")[0]
    return kind


def clock(layout: Layout) -> float:
    """Return the time of the store's own file system, on which all machines that share it agree; seconds since 1970.

    Raises CapacityError or UnwritableError if no file can be created.
    """
    with writing(layout.base, 0, REMEDY):
        make_folder(layout.temporaries)
        path = temporary_name(layout.temporaries)
        fd = create_exclusive(path)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            discard(path)


NOTICE_SECONDS = 10.0


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the lock file `path`, waiting as long as its holder lives and calling `waiting()` every 10 s.

    Yields False, holding nothing, where locks are unavailable (read-only, no flock): callers must be right without. The
    lock is flock's, so the kernel drops it when the process ends in any way. The empty file stays.
    """
    lock = _acquire(path, waiting)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def _acquire(path: Path, waiting: Callable[[], None] | None) -> BaseFileLock | None:
    from filelock import Timeout

    try:
        make_folder(path.parent)
        lock = _flock(path)
        while True:
            try:
                lock.acquire(timeout=NOTICE_SECONDS)
            except Timeout:
                if waiting is not None:
                    waiting()
            else:
                return lock
    except (OSError, NotImplementedError) as error:
        logger().debug("no lock at %s (%s): continuing without", path, error)
        return None


def _flock(path: Path) -> BaseFileLock:
    """Return a lock that uses only flock: one based on a file's existence would outlive its holder."""
    from filelock import FileLock

    try:
        return FileLock(path, thread_local=False, fallback_to_soft=False)
    except TypeError:  # filelock < 4 has no such fallback
        return FileLock(path, thread_local=False)
