"""Writing a bundle folder atomically, with concurrent writers and across power cuts.

The new bundle is built in a sibling folder, made durable, and then replaces the old one (folder_swap.py). Where names
cannot be exchanged, a writer that is killed between the two renames leaves the old bundle, which `recover` restores.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from llmc.artifacts.atomic_write import (
    BLOB_MODE,
    create_exclusive,
    make_folder,
    sync_folder,
    write_all,
    write_atomic,
    writing,
)
from llmc.artifacts.bundle.manifest import (
    CHECKSUM_NAME,
    FILE_NAME,
    KIND,
    MAX_BYTES,
    SIGNATURE_NAME,
    Manifest,
    checksum_line,
)
from llmc.artifacts.bundle.reader import BLOBS, BundleFiles, blob_path, recover
from llmc.artifacts.digest import BUFFER, PREFIX, open_regular
from llmc.artifacts.folder_swap import FolderSwap
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.errors import ArtifactError

REMEDY = "choose another folder with -o"
_COPY_INSTEAD = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES})
_WRITABLE = 0o222
_OURS = re.compile(r"blobs|manifest\..*|signature.*|\.stamps\.json|\.DS_Store|\.nfs.*|[0-9a-f]{24}")


def write_bundle(
    dest: str | Path, manifest: Manifest, blob_sources: Mapping[str, Path], signature: bytes | None = None
) -> Path:
    """Write the bundle of `manifest` to `dest`, replacing a bundle there; return the absolute folder.

    `blob_sources` has a verified file for every blob (`Store.path`). Read-only files, such as the store's, are linked
    where the file system allows it; others are copied and verified. If `dest` already is this bundle and intact, only
    `signature`, the content of the signature file, is written. Afterwards, even with concurrent writers, `dest` is a
    complete bundle, old or new.

    Raises BlobMissingError for a blob without an intact source, ArtifactError if `dest` is something other than a
    bundle, CapacityError or UnwritableError if it cannot be written; then `dest` is unchanged.
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
    SWAP.sweep(folder)
    if is_same(folder, manifest):
        if signature is not None:
            write_signature(folder, signature)
        return folder
    with writing(folder, manifest.size, REMEDY):
        make_folder(folder.parent)
        with SWAP.sibling(folder) as new:
            _fill(new, manifest, blob_sources, signature)
            SWAP.install(new, folder)
    return folder


def write_signature(folder: Path, signature: bytes) -> None:
    """Write a signature file into a bundle atomically. Raises CapacityError or UnwritableError."""
    path = folder / SIGNATURE_NAME
    with writing(path, len(signature), "make the bundle's folder writable"):
        write_atomic(path, signature, folder)


def is_same(folder: Path, manifest: Manifest) -> bool:
    """Whether `folder` has exactly this manifest and every blob is intact, by valid stamp or digest."""
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
    """Raise ArtifactError unless `folder` is absent, empty, or contains only a bundle, which may be damaged."""
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
            f"{folder}: not a bundle, so it is not replaced; choose another folder with -o, or remove it"
        )
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign:
        names = foreign[:5]
        raise ArtifactError(
            f"{folder}: not replaced, because it contains files that are not a bundle's ({', '.join(names)}); "
            "move them away"
        )


def _fill(new: Path, manifest: Manifest, sources: Mapping[str, Path], signature: bytes | None) -> None:
    blobs = new / BLOBS
    blobs.mkdir(parents=True)
    for digest, size in manifest.blobs.items():
        _put(sources[digest], blob_path(new, digest), digest, size)
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


def _put(source: Path, target: Path, digest: str, size: int) -> None:
    """Link or copy one blob. Raises BlobMissingError if the source does not match the manifest."""
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


def _claims_to_be_bundle(file: Path) -> bool:
    try:
        with open_regular(file) as stream:
            return KIND.encode() in stream.read(1 << 20)
    except OSError:
        return False


def _remove(path: Path) -> None:
    import shutil

    with suppress(OSError):
        # Remove the manifest first: a half-removed folder must never look like a bundle.
        (path / FILE_NAME).unlink()
    shutil.rmtree(path, ignore_errors=True)


SWAP = FolderSwap(check_replaceable, _remove, "name a folder inside it with -o")
