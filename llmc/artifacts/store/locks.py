"""Locks between processes that end with their holder. They prevent duplicate work; results are right without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.atomic_write import make_folder
from llmc.artifacts.log import logger

if TYPE_CHECKING:
    from filelock import BaseFileLock

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
