"""Replacing a whole folder in one step.

The new folder is built as a sibling `.<name>.<random>.new` and then replaces the old one:

    nothing there     rename                              atomic
    a folder there    exchange of the two names (Linux)   atomic; the sibling is now the old folder, and is deleted
    elsewhere         rename the old one to               no folder between the two renames; a writer killed
                      `.<name>.<random>.old`, rename      there leaves the old one
                      the new one, delete the old

The next writer sweeps the siblings of dead writers: a live writer holds a flock on its folder.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmc.artifacts.atomic_write import UnwritableError, sync_folder
from llmc.artifacts.flock import flock
from llmc.errors import ArtifactError

ATTEMPTS = 100
STALE_SECONDS = 24 * 3600
RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


class FolderSwap:
    """Replacement of one kind of folder.

    `check` raises ArtifactError unless the content of a path may be replaced. `remove` deletes a folder or file and
    raises nothing. `remedy` is the advice for a path that is a mount point.
    """

    def __init__(self, check: Callable[[Path], None], remove: Callable[[Path], None], remedy: str) -> None:
        self._check, self._remove, self._remedy = check, remove, remedy

    @contextmanager
    def sibling(self, folder: Path) -> Iterator[Path]:
        """Yield a new folder next to `folder`, locked against sweeps; removed at the end with its content."""
        path, fd = self._new_folder(folder)
        try:
            yield path
        finally:
            self._remove(path)
            if fd is not None:
                os.close(fd)

    def install(self, new: Path, folder: Path) -> None:
        """Move the complete folder `new` to `folder`; the previous content is then at `new` or deleted.

        Raises OSError, UnwritableError for a mount point, and what `check` raises.
        """
        for _ in range(ATTEMPTS):
            try:
                os.rename(new, folder)  # noqa: PTH104 - succeeds when nothing, or an empty folder, is there
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise UnwritableError(f"{folder}: a mount point cannot be replaced; {self._remedy}") from error
                if error.errno not in _OCCUPIED:
                    raise
            else:
                break
            self._check(folder)
            if _exchange(new, folder) or self._replace(new, folder):
                break
        else:
            raise ArtifactError(f"{folder}: other processes keep replacing it; try again")
        sync_folder(folder.parent)

    def sweep(self, folder: Path) -> None:
        """Remove what dead writers left next to `folder`."""
        for item in [*siblings(folder, "new"), *(siblings(folder, "old") if folder.exists() else ())]:
            with suppress(OSError):
                fd = _lock(Path(item.path))
                if fd is not None or time.time() - item.stat().st_mtime > STALE_SECONDS:
                    self._remove(Path(item.path))
                if fd is not None:
                    os.close(fd)

    def _replace(self, new: Path, folder: Path) -> bool:
        """Swap with two renames; False if another process interfered and the caller may retry."""
        old = _name(folder, "old")
        try:
            os.rename(folder, old)  # noqa: PTH104
        except FileNotFoundError:
            return False
        try:
            os.rename(new, folder)  # noqa: PTH104
        except OSError as error:
            if error.errno not in _OCCUPIED:
                with suppress(OSError):
                    os.rename(old, folder)  # noqa: PTH104
                raise
            return False
        finally:
            if folder.exists():
                self._remove(old)
        return True

    def _new_folder(self, folder: Path) -> tuple[Path, int | None]:
        while True:
            path = _name(folder, "new")
            path.mkdir()
            try:
                fd = _lock(path)
            except (BlockingIOError, FileNotFoundError):  # a sweep came first and is removing it
                continue
            except OSError:
                self._remove(path)
                raise
            if path.exists():
                return path, fd
            if fd is not None:
                os.close(fd)


def siblings(folder: Path, role: str) -> list[os.DirEntry[str]]:
    """Return the folders that writers created next to `folder`, of role "new" or "old"."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{16}}\.{role}")
    try:
        with os.scandir(folder.parent) as items:
            return [item for item in items if pattern.fullmatch(item.name)]
    except OSError:
        return []


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False if the system cannot, or one of them is gone."""
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE or code == errno.ENOENT:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _lock(path: Path) -> int | None:
    """Lock a folder while the descriptor is open. Returns None if that fails; raises BlockingIOError if it is held."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if (mine := flock(fd)) is True:
        return fd
    os.close(fd)
    if mine is False:
        raise BlockingIOError(errno.EWOULDBLOCK, "in use", str(path))
    return None


def _name(folder: Path, role: str) -> Path:
    import secrets  # a start imports this module and replaces no folder

    return folder.parent / f".{folder.name}.{secrets.token_hex(8)}.{role}"
