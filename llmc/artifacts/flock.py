"""Non-blocking flock. The kernel releases such a lock when its holder ends in any way.

A lock attempt has three results, because a file system may have no locks (ENOLCK, ENOSYS), or may grant every lock to
everybody (NFS without its lock service). The result is then unknown (None), and callers decide by age.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_HELD_ELSEWHERE = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES})


def flock(fd: int, *, shared: bool = False) -> bool | None:
    """Lock an open file until it is closed. Returns False if another holds it, None if locks are unavailable."""
    import fcntl

    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD_ELSEWHERE else None
    return True


def locked_folder(make: Callable[[], Path]) -> tuple[Path, int]:
    """Create a folder with `make` and lock it; return it and the descriptor that holds the lock.

    Creates another if a sweep removed the first. Raises OSError.
    """
    while True:
        folder = make()
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if flock(fd) is not False and folder.exists():
            return folder, fd
        os.close(fd)


@contextmanager
def probe(path: Path) -> Iterator[bool | None]:
    """Yield whether nobody holds a file or folder, which nobody else can then lock inside the block.

    Yields None if that is unknown. Raises OSError if the path cannot be opened.
    """
    one = _open(path)
    try:
        found = flock(one)
        if found:
            found = True if keeps_out(path) else None
        yield found
    finally:
        os.close(one)


def keeps_out(path: Path) -> bool:
    """Whether this process's lock on a file excludes others. Raises OSError if it cannot be opened."""
    other = _open(path)
    try:
        return flock(other) is False
    finally:
        os.close(other)


def _open(path: Path) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | flags)
    except (IsADirectoryError, PermissionError):
        return os.open(path, os.O_RDONLY | flags)
