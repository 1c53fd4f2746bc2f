"""Durable, atomic file publication: write a temporary file, fsync it, rename it, and fsync the folder.

Readers see the old content or the new content, never a part. After a power cut, published files are complete. A failed
write removes the temporary file and raises one of two errors:

    CapacityError      disk full, quota or file size limit reached, device error (ENOSPC, EDQUOT, EFBIG, EIO)
    UnwritableError    anything else: read-only, no permission, a file in place of a folder
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
    """A store or folder cannot be written; it may still be readable."""


@contextmanager
def writing(path: Path, needed: int, remedy: str) -> Iterator[None]:
    """Convert an OSError in the block to CapacityError or UnwritableError.

    The message names `path`, the bytes `needed`, and `remedy`.
    """
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
    """Create `path` and its missing parents durably. Raises OSError."""
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
    """Fsync a folder so that the names in it are durable, where the file system supports that. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def temporary_name(folder: Path) -> Path:
    """Return a random path in `folder` that no other process will choose."""
    return folder / os.urandom(12).hex()


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`, repeating partial writes. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def create_exclusive(path: Path, mode: int = 0o666) -> int:
    """Open a new file for writing; the umask applies to `mode`. Raises OSError, also if the file exists."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def write_atomic(
    path: Path, data: bytes | Iterable[bytes], temporaries: Path, *, durable: bool = True, mode: int | None = None
) -> None:
    """Publish `data`, whole or in pieces, as `path`, replacing an existing file.

    `temporaries` is a folder on the same file system. Both folders must exist. With `mode`, the umask does not apply.
    Raises OSError: then `path` is unchanged and no temporary remains. If only the final folder sync fails, `path`
    already has the new content.
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
    """Remove a file if it exists and can be removed."""
    with suppress(OSError):
        path.unlink()
