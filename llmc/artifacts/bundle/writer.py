"""Writing a bundle folder: whole or not at all, also with other writers at once and after a power cut.

The new bundle is built in a sibling folder `.<name>.<random>.new`, made durable, and then takes the place of
the old one:

    nothing there     rename                              atomic
    a bundle there    exchange of the two names (Linux)   atomic; the old one is the sibling now, deleted
    elsewhere         rename the old one to               no bundle between the two renames; whoever is
                      `.<name>.<random>.old`, rename      killed there leaves the old one, and `recover`
                      the new one, delete the old         puts it back

Siblings of dead writers are swept by the next one: a live writer holds a flock on its folder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from llmc.artifacts.atomic_write import (
    BLOB_MODE,
    UnwritableError,
    create_exclusive,
    make_folder,
    sync_folder,
    write_all,
    write_atomic,
    writing,
)
from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.manifest_schema import (
    CHECKSUM_NAME,
    FILE_NAME,
    KIND,
    MAX_BYTES,
    SIGNATURE_NAME,
    checksum_line,
)
from llmc.artifacts.bundle.reader import BLOBS, BundleFiles, blob_path
from llmc.artifacts.bundle.recovery import recover, siblings
from llmc.artifacts.digest import BUFFER, PREFIX, open_regular
from llmc.artifacts.flock import flock
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.errors import ArtifactError

REMEDY = "choose another place with -o"
ATTEMPTS = 100
STALE_SECONDS = 24 * 3600
RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})
_COPY_INSTEAD = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES})
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_WRITABLE = 0o222
_OURS = re.compile(r"blobs|manifest\..*|signature.*|\.stamps\.json|\.DS_Store|\.nfs.*|[0-9a-f]{24}")


def write_bundle(
    dest: str | Path, manifest: Manifest, blob_sources: Mapping[str, Path], signature: bytes | None = None
) -> Path:
    """Make `dest` the bundle of `manifest`, replacing a bundle that is there; returns the folder, absolute.

    `blob_sources` has a verified file for every blob (`Store.path`). Read-only files, as the store's are, are
    linked where the file system allows it; others are copied and verified. A `dest` that is this bundle
    already, and intact, is left alone, but for `signature`, the content of the signature file. Afterwards,
    whatever happens meanwhile, `dest` is a complete bundle, old or new.

    Raises BlobMissingError for a blob without a sound source, ArtifactError where `dest` is something other
    than a bundle, CapacityError or UnwritableError where it cannot be written; then `dest` is as it was.
    """
    folder = Path(os.path.realpath(dest))
    missing = sorted(set(manifest.blobs) - set(blob_sources))
    if missing:
        raise BlobMissingError(f"{folder}: no source for blob {missing[0]} ({manifest.use_of(missing[0])})")
    if (size := len(manifest.to_bytes())) > MAX_BYTES:
        much = f"a manifest of {len(manifest.executables)} executables has {size} bytes, more than the {MAX_BYTES}"
        raise ArtifactError(f"{folder}: {much} that can be read; plan fewer buckets")
    recover(folder)
    check_replaceable(folder)
    _sweep(folder)
    if is_same(folder, manifest):
        if signature is not None:
            write_signature(folder, signature)
        return folder
    with writing(folder, manifest.size, REMEDY):
        make_folder(folder.parent)
        with _sibling(folder) as new:
            _fill(new, manifest, blob_sources, signature)
            _install(new, folder)
    return folder


def write_signature(folder: Path, signature: bytes) -> None:
    """Put a signature file into a bundle, atomically. Raises CapacityError or UnwritableError."""
    path = folder / SIGNATURE_NAME
    with writing(path, len(signature), "make the bundle's folder writable"):
        write_atomic(path, signature, folder)


def is_same(folder: Path, manifest: Manifest) -> bool:
    """Whether `folder` holds exactly this manifest, every blob intact, by digest unless its stamp holds."""
    try:
        with BundleFiles.open(folder) as files:
            if files.manifest != manifest:
                return False
            for digest in manifest.blobs:
                files.path(digest)
    except ArtifactError:
        return False
    return True


def check_replaceable(folder: Path) -> None:
    """Raise ArtifactError unless `folder` is absent, empty, or a bundle (perhaps damaged) alone."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208
    except FileNotFoundError:
        return
    except OSError as error:
        raise ArtifactError(f"{folder}: not a folder that a bundle can replace ({error.strerror})") from error
    if not names:
        return
    if not (folder / BLOBS).is_dir() and not _claims_to_be_bundle(folder / FILE_NAME):
        raise ArtifactError(
            f"{folder}: not a bundle, so it is not replaced; choose another place with -o, or remove it"
        )
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign:
        names = foreign[:5]
        raise ArtifactError(
            f"{folder}: not replaced, as it holds more than a bundle ({', '.join(names)}): move that away"
        )


def _fill(new: Path, manifest: Manifest, sources: Mapping[str, Path], signature: bytes | None) -> None:
    blobs = new / BLOBS
    blobs.mkdir(parents=True)
    for digest, size in manifest.blobs.items():
        _place(sources[digest], blob_path(new, digest), digest, size)
    sync_folder(blobs)
    sync_folder(blobs.parent)
    for name, content in (
        (SIGNATURE_NAME, signature),
        (CHECKSUM_NAME, checksum_line(manifest.digest)),
        (FILE_NAME, manifest.to_bytes()),
    ):
        if content is not None:
            fd = create_exclusive(new / name)
            try:
                write_all(fd, content)
                os.fsync(fd)
            finally:
                os.close(fd)
    sync_folder(new)


def _place(source: Path, target: Path, digest: str, size: int) -> None:
    """Link or copy one blob. Raises BlobMissingError unless the source is what the manifest says."""
    try:
        status = source.stat()
    except OSError as error:
        raise BlobMissingError(f"{source}: blob {digest} cannot be read ({error.strerror})") from error
    if status.st_size != size:
        raise BlobMissingError(f"{source}: blob {digest} has {status.st_size} bytes, expected {size}")
    if not status.st_mode & _WRITABLE:
        try:
            os.link(os.path.realpath(source), target)
        except OSError as error:
            if error.errno not in _COPY_INSTEAD:
                raise
        else:
            return
    _copy(source, target, digest)


def _copy(source: Path, target: Path, digest: str) -> None:
    import hashlib

    hasher = hashlib.sha256()
    fd = create_exclusive(target)
    try:
        for piece in _pieces(source):
            hasher.update(piece)
            write_all(fd, piece)
        if PREFIX + hasher.hexdigest() != digest:
            raise BlobMissingError(f"{source}: is not blob {digest}; its content has another digest")
        os.fchmod(fd, BLOB_MODE)
        os.fsync(fd)
    finally:
        os.close(fd)


def _pieces(source: Path) -> Iterator[bytes]:
    try:
        with open_regular(source) as file:
            while piece := file.read(BUFFER):
                yield piece
    except OSError as error:
        raise BlobMissingError(f"{source}: cannot be read ({error.strerror})") from error


def _install(new: Path, folder: Path) -> None:
    """Move the finished bundle to its place; the previous content is then at `new` or gone."""
    for _ in range(ATTEMPTS):
        try:
            os.rename(new, folder)  # noqa: PTH104 - succeeds when nothing, or an empty folder, is there
        except OSError as error:
            if error.errno == errno.EBUSY:
                message = f"{folder}: a mount point cannot be replaced; name a folder inside it with -o"
                raise UnwritableError(message) from error
            if error.errno not in _OCCUPIED:
                raise
        else:
            break
        check_replaceable(folder)
        if _exchange(new, folder) or _replace(new, folder):
            break
    else:
        raise ArtifactError(f"{folder}: other processes keep replacing it; try again")
    sync_folder(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system cannot, or one of them has gone."""
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


def _replace(new: Path, folder: Path) -> bool:
    """Swap in two renames; False when another process came between, which may be tried again."""
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
            _remove(old)
    return True


@contextmanager
def _sibling(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, locked against the sweep; removed at the end, whatever is in it then."""
    path, fd = _new_folder(folder)
    try:
        yield path
    finally:
        _remove(path)
        if fd is not None:
            os.close(fd)


def _new_folder(folder: Path) -> tuple[Path, int | None]:
    while True:
        path = _name(folder, "new")
        path.mkdir()
        try:
            fd = _lock(path)
        except (BlockingIOError, FileNotFoundError):  # a sweep came first and is removing it
            continue
        except OSError:
            _remove(path)
            raise
        if path.exists():
            return path, fd
        if fd is not None:
            os.close(fd)


def _sweep(folder: Path) -> None:
    """Remove what dead writers left beside `folder`."""
    for item in [*siblings(folder, "new"), *(siblings(folder, "old") if folder.exists() else ())]:
        with suppress(OSError):
            fd = _lock(Path(item.path))
            if fd is not None or time.time() - item.stat().st_mtime > STALE_SECONDS:
                _remove(Path(item.path))
            if fd is not None:
                os.close(fd)


def _lock(path: Path) -> int | None:
    """Lock a folder while the descriptor is open; None where that fails, BlockingIOError if it is held."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if (mine := flock(fd)) is True:
        return fd
    os.close(fd)
    if mine is False:
        raise BlockingIOError(errno.EWOULDBLOCK, "in use", str(path))
    return None


def _name(folder: Path, role: str) -> Path:
    return folder.parent / f".{folder.name}.{secrets.token_hex(8)}.{role}"


def _claims_to_be_bundle(file: Path) -> bool:
    """Whether a file is a manifest, or the rest of a damaged one."""
    try:
        with open_regular(file) as stream:
            return KIND.encode() in stream.read(1 << 20)
    except OSError:
        return False


def _remove(path: Path) -> None:
    import shutil

    with suppress(OSError):
        # the manifest goes first, so that a half-removed folder is never taken for a bundle
        (path / FILE_NAME).unlink()
    shutil.rmtree(path, ignore_errors=True)
