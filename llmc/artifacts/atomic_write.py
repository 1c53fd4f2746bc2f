"""Durable, atomic publication of files: write to a temporary name, fsync, rename, fsync the folder.

A reader sees the old content or the new, never a part; after a power cut what was published is whole.
Every failure to write becomes one of two errors, and the temporary is gone when it is raised:

CapacityError      disk full, quota or file size limit reached, device error (ENOSPC, EDQUOT, EFBIG, EIO)
UnwritableError    anything else: read-only, no permission, a file where a folder should be
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmc.errors import ArtifactError, CapacityError

CAPACITY_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
BLOB_MODE = 0o444
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


class UnwritableError(ArtifactError):
    """A store or folder that can be read perhaps, but not written."""


@contextmanager
def writing(path: Path, needed: int, remedy: str) -> Iterator[None]:
    """Turn OSError inside into CapacityError or UnwritableError with `path`, bytes `needed` and `remedy`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in CAPACITY_ERRNOS:
            raise CapacityError(
                f"{path}: {reason}; {needed} bytes were needed, nothing was published; free some space, or {remedy}"
            ) from error
        raise UnwritableError(f"{path}: cannot be written ({reason}); make it writable, or {remedy}") from error


def make_folder(path: Path) -> None:
    """Create `path` and its parents, each made durable in the folder above it. Raises OSError."""
    if path.is_dir():
        return
    if path.parent == path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    make_folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
        sync_folder(path.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the file system can do that. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def temporary_name(folder: Path) -> Path:
    """A name in `folder` that no other process will choose."""
    return folder / os.urandom(12).hex()


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`, whatever pieces the system takes it in. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def create_exclusive(path: Path, mode: int = 0o666) -> int:
    """Open a new file for writing; the umask applies to `mode`. Raises OSError, also when the file exists."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def write_atomic(
    path: Path, data: bytes | Iterable[bytes], temporaries: Path, *, durable: bool = True, mode: int | None = None
) -> None:
    """Publish `data`, whole or in pieces, as `path`, replacing what was there.

    `temporaries` is a folder of the same file system. With a `mode` the umask does not apply. Both folders must
    exist. On OSError, which is passed on, `path` is as it was and no temporary remains; but when the folder cannot be
    made durable at the end, `path` has the new content already.
    """
    temporary = temporary_name(temporaries)
    try:
        fd = create_exclusive(temporary)
        try:
            for piece in (data,) if isinstance(data, bytes) else data:
                write_all(fd, piece)
            if mode is not None:
                os.fchmod(fd, mode)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)  # noqa: PTH104 - the system call, by its name
    except BaseException:
        discard(temporary)
        raise
    if durable:
        sync_folder(path.parent)


def discard(path: Path) -> None:
    """Remove a file if it is there and can be removed."""
    with suppress(OSError):
        path.unlink()
