"""Export: bundles and entries into one archive, whole or not at all. The grammar is in format.py."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from llmc.artifacts.archives.compression import LEVEL, LEVELS, SUFFIXES, Compressor
from llmc.artifacts.archives.format import (
    END,
    MAX_ENTRY_BYTES,
    PIECE,
    blob_name,
    entry_name,
    header,
    packed,
    padding,
)
from llmc.artifacts.archives.stream import Progress
from llmc.artifacts.atomic_write import create_exclusive, discard, sync_folder, write_all, writing
from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.manifest_schema import CHECKSUM_NAME, FILE_NAME, SIGNATURE_NAME, checksum_line
from llmc.artifacts.bundle.reader import BundleFiles, blob_path
from llmc.artifacts.bundle.stored import KIND, bundle_key, bundle_meta, bundle_outputs, read_bundle
from llmc.artifacts.digest import PREFIX, Blob
from llmc.artifacts.store import leases
from llmc.artifacts.store.entries import Entry, encode_entry
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError, InputError

REMEDY = "choose another place for the archive"
TAR_SUFFIXES = (".tar", ".tar.zst", ".tzst")
"""What the name of an archive ends in; the last two are compressed."""

Source = Path | bytes
Item = Entry | BundleFiles
"""What can be exported: an entry of the store, or a bundle folder."""


class Exported(NamedTuple):
    """Entries (or the one bundle), blobs, bytes of the tar, bytes written, and seconds that it took."""

    entries: int
    blobs: int
    bytes: int
    written: int
    seconds: float


class Contents(NamedTuple):
    """An archive before it is written: small members in order, and where each blob comes from."""

    members: Sequence[tuple[str, bytes]]
    blobs: Mapping[str, tuple[int, Callable[[], Source]]]
    entries: int

    @property
    def size(self) -> int:
        """Bytes of the tar."""
        sizes = [len(content) for _, content in self.members] + [size for size, _ in self.blobs.values()]
        return sum(map(packed, sizes)) + len(END)


def is_archive_name(text: str) -> bool:
    """Whether a name is that of an archive."""
    return text.endswith(TAR_SUFFIXES)


def bundle_contents(store: Store, item: Item) -> Contents:
    """One bundle. Raises ArtifactError when it is damaged, or the entry is not a bundle's."""
    manifest, signature, blobs = _bundle(store, item)
    content = manifest.to_bytes()
    members = [(FILE_NAME, content), (CHECKSUM_NAME, checksum_line(manifest.digest))]
    if signature is not None:
        members.append((SIGNATURE_NAME, signature))
    return Contents(members, blobs, 1)


def entry_contents(store: Store, items: Iterable[Item]) -> Contents:
    """Several things. Raises ArtifactError for one that is damaged or that stays on this machine."""
    members: dict[str, bytes] = {}
    blobs: dict[str, tuple[int, Callable[[], Source]]] = {}
    for item in items:
        if isinstance(item, Entry) and item.key.kind != KIND:
            entry = item
            store.hold(leases.entry_name(entry.key))
            blobs |= {digest: (size, _of_store(store, digest, size)) for digest, size in entry.outputs.values()}
        else:
            manifest, signature, found = _bundle(store, item)
            outputs = bundle_outputs(manifest, signature)
            entry = Entry(bundle_key(manifest), outputs, bundle_meta(manifest), 0.0, 0.0)
            blobs |= found
            for name, content in ((FILE_NAME, manifest.to_bytes()), (SIGNATURE_NAME, signature)):
                if content is not None:
                    blobs[outputs[name].digest] = len(content), _of_bytes(content)
        if entry.key.is_local:
            raise ArtifactError(
                f"{entry.key.kind} {entry.key.short} means something on this machine only, and is not exported"
            )
        members[entry_name(entry.key)] = encode_entry(entry)
    if sum(map(len, members.values())) > MAX_ENTRY_BYTES:
        raise InputError(f"{len(members)} entries take over {MAX_ENTRY_BYTES >> 20} MiB: export fewer at once, by KEY")
    return Contents(sorted(members.items()), blobs, len(members))


def write_archive(
    contents: Contents, dest: Path | BinaryIO, *, level: int | None = None, progress: Progress | None = None
) -> Exported:
    """Write an archive; a file appears whole, durable, and then replaces what was there.

    Compressed by zstd when the name says so (".zst", ".tzst"), and a stream when `level` is given. The tar's bytes
    depend on the contents only. Raises InputError for a name or level that cannot be used, ArtifactError for a blob
    that is missing or damaged, CapacityError or UnwritableError where `dest` cannot be written, and DeviceError where
    zstd is missing.
    """
    began = time.monotonic()
    squeezed = level is not None
    if isinstance(dest, Path):
        squeezed = dest.name.endswith(SUFFIXES)
        if not is_archive_name(dest.name):
            raise InputError(f"{dest}: name an archive {' or '.join(TAR_SUFFIXES)}")
        if level is not None and not squeezed:
            raise InputError(f"{dest}: a level is for compressed archives; name it .tar.zst")
    if level is not None and level not in LEVELS:
        raise InputError(f"level {level} is not one of {LEVELS.start} to {LEVELS.stop - 1}")
    compressor = Compressor(LEVEL if level is None else level) if squeezed else None
    total = contents.size
    done = written = 0
    with _opened(dest, total) as write:
        for piece in _pieces(contents):
            data = compressor.compress(piece) if compressor else piece
            write(data)
            written += len(data)
            done += len(piece)
            if progress is not None:
                progress(done, total)
        if compressor:
            data = compressor.flush()
            write(data)
            written += len(data)
    return Exported(contents.entries, len(contents.blobs), total, written, time.monotonic() - began)


def _bundle(
    store: Store, item: Item
) -> tuple[Manifest, bytes | None, dict[str, tuple[int, Callable[[], Source]]]]:  # fmt: skip
    if isinstance(item, Entry):
        store.hold(leases.entry_name(item.key))
        manifest, signature = read_bundle(store, item)
        found = {digest: (size, _of_store(store, digest, size)) for digest, size in manifest.blobs.items()}
    else:
        manifest, signature = item.manifest, item.signature
        found = {digest: (size, _of_folder(item, digest)) for digest, size in manifest.blobs.items()}
    return manifest, signature, found


def _of_store(store: Store, digest: str, size: int) -> Callable[[], Source]:
    return lambda: store.path(Blob(digest, size), verify=False)


def _of_folder(files: BundleFiles, digest: str) -> Callable[[], Source]:
    return lambda: blob_path(files.folder, digest)


def _of_bytes(content: bytes) -> Callable[[], Source]:
    return lambda: content


def _pieces(contents: Contents) -> Iterator[bytes]:
    for name, content in contents.members:
        yield header(name, len(content)) + content + bytes(padding(len(content)))
    for digest, (size, source) in sorted(contents.blobs.items()):
        yield header(blob_name(digest), size)
        yield from _content(source(), digest, size)
        yield bytes(padding(size))
    yield END


def _content(source: Source, digest: str, size: int) -> Iterator[bytes]:
    """A blob, hashed as it is read. Raises ArtifactError unless it is what its name says."""
    if isinstance(source, bytes):
        yield source
        return
    hasher, left = hashlib.sha256(), size
    try:
        with source.open("rb", buffering=0) as file:
            while piece := file.read(min(PIECE, left)):
                hasher.update(piece)
                left -= len(piece)
                yield piece
    except OSError as error:
        raise ArtifactError(f"{source}: cannot be read ({error.strerror}); nothing was exported") from error
    if left or PREFIX + hasher.hexdigest() != digest:
        raise ArtifactError(
            f"{source}: damaged, it is not {digest} any more; nothing was exported: see `llmc cache verify`"
        )


@contextmanager
def _opened(dest: Path | BinaryIO, needed: int) -> Iterator[Callable[[bytes], None]]:
    """Writes to a stream as it is; for a path to a file beside it that takes its name when the block ends well."""
    if not isinstance(dest, Path):
        stream = dest
        yield _guarded(Path("standard output"), needed, stream.write)
        stream.flush()
        return
    final = Path(os.path.realpath(dest))
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(8)}")
    with writing(final, needed, REMEDY):
        fd = create_exclusive(temporary)
    try:
        try:
            yield _guarded(final, needed, lambda data: write_all(fd, data))
            with writing(final, needed, REMEDY):
                os.fsync(fd)
        finally:
            os.close(fd)
        with writing(final, needed, REMEDY):
            os.rename(temporary, final)  # noqa: PTH104 - the system call, by its name
            sync_folder(final.parent)
    finally:
        discard(temporary)


def _guarded(place: Path, needed: int, write: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def guarded(data: bytes) -> None:
        with writing(place, needed, REMEDY):
            write(data)

    return guarded
