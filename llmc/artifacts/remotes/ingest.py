"""Results of a remote: judged by their entries, and added to a store, blobs first, protected from collection.

A download resumes where an earlier attempt, of any process, stopped:

    <store>/v1/tmp/partial-<64 hex>    the first bytes of a blob that is being fetched; held by flock meanwhile

The file is renamed only when the digest is right. Where flock is missing or excludes nobody, each download has its own
file and starts from the beginning.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from llmc.artifacts.atomic_write import (
    UnwritableError,
    create_exclusive,
    discard,
    make_folder,
    temporary_name,
    write_all,
    writing,
)
from llmc.artifacts.bundle.manifest import FILE_NAME, SIGNATURE_NAME, Manifest
from llmc.artifacts.bundle.manifest import MAX_BYTES as MAX_MANIFEST_BYTES
from llmc.artifacts.bundle.reader import MAX_SIGNATURE_BYTES
from llmc.artifacts.bundle.stored import KIND, require_agreement
from llmc.artifacts.bundle.trust import Trust, TrustDecision, code_of_bundle, code_of_entry
from llmc.artifacts.digest import BUFFER, PREFIX, Blob, digest_bytes, parse
from llmc.artifacts.flock import flock, keeps_out
from llmc.artifacts.remotes.base import ObjectError, Progress, Remote, blob_name, entry_name
from llmc.artifacts.store import leases
from llmc.artifacts.store.blobs import REMEDY, BlobMissingError
from llmc.artifacts.store.entries import MAX_BYTES, Entry, decode_entry, entry_body
from llmc.artifacts.store.locks import publish_lock
from llmc.artifacts.store.workspace import Area
from llmc.errors import CapacityError


def read_entry(remote: Remote, name: str) -> Entry | None:
    """Return the entry of this name in a remote, or None.

    Raises ObjectError for an entry that is torn, altered, of another schema, or filed under another key's name.
    """
    data = remote.read(name, MAX_BYTES)
    if data is None:
        return None
    try:
        entry = decode_entry(data)
    except ValueError as error:
        raise ObjectError(f"{remote.url}: {name} is not an entry ({error}); push it again") from None
    if entry_name(entry.key) != name:
        raise ObjectError(f"{remote.url}: {name} belongs to {entry.key.kind} {entry.key.short}; delete it there")
    return entry


def judge(remote: Remote, entry: Entry, trust: Trust) -> tuple[TrustDecision, Mapping[str, bytes]]:
    """Decide whether to accept an entry of a remote; return the decision and the contents read for it, by digest.

    A bundle is judged by its manifest and signature file, which are read and must match the entry; anything else by the
    entry's own signature. Raises UntrustedError, ObjectError or ArtifactError.
    """
    origin = f"{remote.url}: {entry.key.kind} {entry.key.short}"
    if entry.key.kind != KIND:
        native = code_of_entry(entry.key, entry.meta) is not None
        return TrustDecision(trust, entry_body(entry), entry.envelope, native=native, origin=origin), {}
    if FILE_NAME not in entry.outputs:
        raise ObjectError(f"{origin} names no {FILE_NAME}; delete it there, or push it again")
    content = read_blob(remote, entry.outputs[FILE_NAME], MAX_MANIFEST_BYTES)
    signed = entry.outputs.get(SIGNATURE_NAME)
    signature = None if signed is None else read_blob(remote, signed, MAX_SIGNATURE_BYTES)
    manifest = Manifest.from_bytes(content, origin)
    require_agreement(entry, manifest, signature, origin)
    admission = TrustDecision(trust, content, signature, native=code_of_bundle(manifest) is not None, origin=origin)
    return admission, {digest_bytes(item): item for item in (content, signature) if item is not None}


def read_blob(remote: Remote, blob: Blob, limit: int) -> bytes:
    """Return a small blob of a remote, verified. Raises ObjectError."""
    name = blob_name(blob.digest)
    if blob.size > limit:
        raise ObjectError(f"{remote.url}: {name} has {blob.size} bytes, more than the limit of {limit}")
    data = remote.read(name, blob.size)
    if data is None:
        raise ObjectError(f"{remote.url}: {name} is missing; push it again")
    if len(data) != blob.size or digest_bytes(data) != blob.digest:
        raise ObjectError(
            f"{remote.url}: {name} is damaged: its content has digest {digest_bytes(data)}; push it again"
        )
    return data


def keeps(there: Entry | None, coming: Entry) -> bool:
    """Whether the existing entry for a key stays when another one arrives.

    It stays if both name the same outputs, or if only the existing entry is signed. Any other signed entry that arrives
    replaces it.
    """
    if there is None:
        return False
    if is_signed(coming):
        return entry_body(there) == entry_body(coming) and there.signature == coming.signature
    return is_signed(there) or dict(there.outputs) == dict(coming.outputs)


def is_signed(entry: Entry) -> bool:
    """Whether an entry, or its bundle, has a signature, by any key."""
    return entry.signature is not None or (entry.key.kind == KIND and SIGNATURE_NAME in entry.outputs)


def name_of(name: str) -> str:
    """Return an entry's name for display: its kind and the first digits of its key."""
    path = PurePosixPath(name)
    return f"{path.parent.name} {path.stem[:12]}"


NAME = "partial-"
POLL_SECONDS = 0.1


def expect(area: Area, entries: Iterable[Entry]) -> None:
    """Protect entries and blobs that are to arrive from collection, as long as `area` lives."""
    for entry in entries:
        names = [leases.blob_name(blob.digest) for blob in entry.outputs.values()]
        area.lease.hold(leases.entry_name(entry.key), *names)


def bring(area: Area, remote: Remote, blob: Blob, contents: Mapping[str, bytes], progress: Progress) -> int:
    """Add a blob to a store, from contents already read or from the remote; return the bytes moved.

    Raises as `fetch_blob` does.
    """
    content = contents.get(blob.digest)
    if content is None:
        return fetch_blob(remote, area, blob, progress)
    area.blobs.put_bytes(content)
    progress(blob.size)
    return blob.size


def settle(area: Area, entry: Entry, admission: TrustDecision, find: Callable[[Blob], Path | None]) -> Entry:
    """Publish a received entry if all of its blobs exist and none is code that is not accepted.

    Raises BlobMissingError if a blob was removed meanwhile, UntrustedError, CapacityError or UnwritableError.
    """
    files = {name: find(blob) for name, blob in entry.outputs.items()}
    admission.examine(path for path in files.values() if path is not None)
    with publish_lock(area.layout):
        for name, blob in entry.outputs.items():
            if find(blob) is None:
                raise BlobMissingError(f"output {name!r} of {entry.key.kind} {entry.key.short} was removed; try again")
        return area.entries.adopt(entry)


def fetch_blob(remote: Remote, area: Area, blob: Blob, progress: Progress) -> int:
    """Fetch a blob of a remote into a store, verified by digest; return the bytes moved.

    An intact blob is not fetched again. If two processes fetch one blob, one waits for the other. `progress` also
    counts bytes of an earlier attempt. Raises ObjectError if the remote's blob is missing or wrong, RemoteError if it
    is not available now (received bytes are kept), and CapacityError or UnwritableError, with nothing left behind.
    """
    with _partial(area, blob, progress) as (fd, path):
        if area.blobs.find(*blob) is not None:
            progress(blob.size)
            discard(path)
            return 0
        moved = _fill(remote, blob, fd, path, progress)
        area.blobs.publish(fd, path, blob)
        return moved


def _fill(remote: Remote, blob: Blob, fd: int, path: Path, progress: Progress) -> int:
    """Complete the file; return the bytes moved. Earlier bytes are used, unless the digest turns out wrong."""
    name = blob_name(blob.digest)
    moved = 0
    while True:
        hasher = hashlib.sha256()
        kept = at = _resume(fd, blob, hasher, path)
        progress(kept)
        if at < blob.size:
            for piece in remote.download(name, at, blob.size):
                with writing(path, blob.size - at, REMEDY):
                    write_all(fd, piece)
                hasher.update(piece)
                at += len(piece)
                moved += len(piece)
                progress(len(piece))
        if at == blob.size and PREFIX + hasher.hexdigest() == blob.digest:
            return moved
        progress(-at)
        with writing(path, 0, REMEDY):
            os.ftruncate(fd, 0)
        if not kept:
            found = f"content has digest {PREFIX}{hasher.hexdigest()}" if at == blob.size else f"ends after {at} bytes"
            raise ObjectError(f"{remote.url}: {name} is damaged: its {found}; push it again")


def _resume(fd: int, blob: Blob, hasher: hashlib._Hash, path: Path) -> int:
    """Hash the existing part and seek to its end; return its length, 0 if it is too long to be a part."""
    with writing(path, blob.size, REMEDY):
        os.lseek(fd, 0, os.SEEK_SET)
        if os.fstat(fd).st_size > blob.size:
            os.ftruncate(fd, 0)
        length = 0
        while piece := os.read(fd, BUFFER):
            hasher.update(piece)
            length += len(piece)
        return length


@contextmanager
def _partial(area: Area, blob: Blob, progress: Progress) -> Iterator[tuple[int, Path]]:
    """Yield the file of a download, open and locked; removed after an error that makes it useless."""
    temporaries = area.layout.temporaries
    with writing(temporaries, blob.size, REMEDY):
        make_folder(temporaries)
        fd, path = _claim(temporaries / f"{NAME}{parse(blob.digest)}", progress)
    try:
        yield fd, path
    except (ObjectError, BlobMissingError, CapacityError, UnwritableError):
        discard(path)
        raise
    finally:
        if not path.name.startswith(NAME) or os.fstat(fd).st_size == 0:
            discard(path)
        os.close(fd)


def _claim(path: Path, progress: Progress) -> tuple[int, Path]:
    """Open and lock a download's file, waiting for another holder. Raises OSError."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        mine = flock(fd)
        if mine and _is(path, fd):
            if keeps_out(path):
                return fd, path
            mine = None
        os.close(fd)
        if mine is None:
            alone = temporary_name(path.parent)
            os.close(create_exclusive(alone))
            return os.open(alone, os.O_RDWR | os.O_CLOEXEC), alone
        if mine is False:
            progress(0)
            time.sleep(POLL_SECONDS)


def _is(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
