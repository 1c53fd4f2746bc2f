"""Bundles and packed caches in one file: a tarred OCI image layout, which skopeo and podman call `oci-archive`.

    archive = tar of "oci-layout" "index.json" {"blobs/sha256/" 64 hex}      the files of an image layout, see layout.py

Written archives depend only on the images, not on time, owner or machine: blobs are sorted by digest, in the format of
tar.py. Archives of other tools can be read: members in any order, with or without folders, and with "./" before their
names. Only regular files and folders with the names above are accepted, each once. Every blob is verified by its
digest.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from llmc.artifacts.atomic_write import write_atomic, writing
from llmc.artifacts.bundle.trust import Trust
from llmc.artifacts.digest import PREFIX, is_digest, parse
from llmc.artifacts.key import canonical_json
from llmc.artifacts.oci import tar
from llmc.artifacts.oci.base import Content, read_small
from llmc.artifacts.oci.image import MANIFEST_TYPE, MAX_MANIFEST_BYTES, Descriptor, describe, read_descriptor
from llmc.artifacts.oci.layout import LAYOUT_FILE, new_index, read_index
from llmc.artifacts.oci.transfer import build, receive
from llmc.artifacts.remotes.base import JOBS, Meter, TransferReport
from llmc.artifacts.remotes.mover import Mover
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from llmc.artifacts.temporaries import temporary_folder
from llmc.errors import ArtifactError, InputError

SUFFIX = ".tar"
REMEDY = "choose another location for the archive"
LAYOUT_NAME, INDEX_NAME, BLOBS = "oci-layout", "index.json", "blobs/sha256/"
MAX_MEMBERS = 100_000
"""Most members of an archive; an image has at most 128 blobs."""

MAX_HEADER_BYTES = 1 << 20
"""Most bytes that tarfile may read at once, because it holds an extended header in memory."""

_COMPRESSED = {b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


class Exported(NamedTuple):
    """The number of images and distinct blobs, the archive's bytes, and the time taken in seconds."""

    images: int
    blobs: int
    bytes: int
    seconds: float


def is_archive_name(text: str) -> bool:
    """Whether a name is that of an archive."""
    return text.endswith(SUFFIX)


def export_images(
    store: Store, entries: Iterable[Entry], dest: Path | BinaryIO, *, progress: Meter | None = None
) -> Exported:
    """Write the bundles and packed caches of these entries into one archive.

    A file is replaced atomically and durably. Raises InputError for a name other than `*.tar`, ArtifactError for an
    entry that is damaged or neither a bundle nor a packed cache, CapacityError or UnwritableError if `dest` cannot be
    written.
    """
    began = time.monotonic()
    if isinstance(dest, Path) and not is_archive_name(dest.name):
        raise InputError(f"{dest}: name an archive NAME{SUFFIX}")
    blobs: dict[str, tuple[int, Content]] = {}
    images: dict[str, dict[str, Any]] = {}
    with Mover(JOBS) as mover:
        for entry in entries:
            image = build(store, entry, None, mover)
            blob = describe(MANIFEST_TYPE, image.manifest)
            images[blob.digest] = {**blob.to_json(), "artifactType": image.kind}
            blobs[blob.digest] = blob.size, _content(image.manifest)
            blobs |= {part.blob.digest: (part.blob.size, part.content) for part in image.parts}
    index = canonical_json(new_index([images[digest] for digest in sorted(images)]))
    files = [(tar.Member(LAYOUT_NAME, len(LAYOUT_FILE)), _content(LAYOUT_FILE))]
    files.append((tar.Member(INDEX_NAME, len(index)), _content(index)))
    files += [(tar.Member(BLOBS + parse(digest), size), content) for digest, (size, content) in sorted(blobs.items())]
    folders = ("blobs/", BLOBS)
    total = tar.archive_size(folders, (member for member, _ in files))
    pieces = _counted(tar.write(folders, ((member, content()) for member, content in files)), total, progress)
    if isinstance(dest, Path):
        final = Path(os.path.realpath(dest))
        with writing(final, total, REMEDY):
            write_atomic(final, pieces, final.parent)
    else:
        with writing(Path("standard output"), total, REMEDY):
            for piece in pieces:
                dest.write(piece)
            dest.flush()
    return Exported(len(images), len(blobs), total, time.monotonic() - began)


def import_archive(
    store: Store, source: Path | BinaryIO, *, trust: Trust, jobs: int = JOBS, progress: Meter | None = None
) -> tuple[list[Entry], TransferReport]:
    """Add every image of an archive to the store, one after the other, each whole or not at all.

    A stream is first copied to a temporary file. Returns the entries, and a report of the layers read and skipped.
    Raises ArtifactError for anything but an intact archive of llmc's images, UntrustedError for an image that is not
    signed as `trust` requires, CapacityError or UnwritableError if the store cannot take it.
    """
    began = time.monotonic()
    with _opened(source) as images:
        reports = []
        entries = []
        for blob in images.manifests():
            origin = f"{images.name}: {blob.digest}"
            entry, report = receive(
                store, images, read_small(images, blob), origin, trust=trust, jobs=jobs, progress=progress
            )
            entries.append(entry)
            reports.append(report)
    return entries, TransferReport(
        entries=len(entries),
        blobs=sum(report.blobs for report in reports),
        bytes=sum(report.bytes for report in reports),
        skipped_blobs=sum(report.skipped_blobs for report in reports),
        skipped_bytes=sum(report.skipped_bytes for report in reports),
        seconds=time.monotonic() - began,
    )


class ImageArchive:
    """The blobs of an archive, read in place (a `base.ImageBlobSource`). Every method raises ArtifactError."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """`file` must be seekable and stay open while this object is used."""
        self.name = name
        self._fd = file.fileno()
        self._locations = self._find(file)
        if LAYOUT_NAME not in self._locations:
            self._fail(f"it has no {LAYOUT_NAME}")

    def manifests(self) -> list[Descriptor]:
        """Return the descriptors of the images, at least one."""
        if INDEX_NAME not in self._locations:
            self._fail(f"it has no {INDEX_NAME}")
        _, size = self._locations[INDEX_NAME]
        data = b"".join(self._read(INDEX_NAME, min(size, MAX_MANIFEST_BYTES + 1)))
        items = read_index(data, f"{self.name}: {INDEX_NAME}")["manifests"]
        if not items:
            self._fail("it contains no image")
        return [read_descriptor(item, (MANIFEST_TYPE,), MAX_MANIFEST_BYTES, self.name) for item in items]

    def read(self, blob: Descriptor) -> Generator[bytes, None, None]:
        name = BLOBS + parse(blob.digest)
        if name not in self._locations:
            self._fail(f"{name}, which is named in it, is missing")
        if self._locations[name][1] != blob.size:
            self._fail(f"{name} has {self._locations[name][1]} bytes, but its descriptor says {blob.size}")
        yield from self._read(name, blob.size)

    def _read(self, name: str, size: int) -> Generator[bytes, None, None]:
        at, _ = self._locations[name]
        end = at + size
        while at < end:
            try:
                piece = os.pread(self._fd, min(tar.PIECE, end - at), at)
            except OSError as error:
                raise ArtifactError(f"{self.name}: cannot be read ({error.strerror})") from error
            if not piece:
                self._fail(f"cut off within {name}")
            at += len(piece)
            yield piece

    def _find(self, file: BinaryIO) -> dict[str, tuple[int, int]]:
        locations: dict[str, tuple[int, int]] = {}
        try:
            file.seek(0)
            with tarfile.open(fileobj=_Bounded(file), mode="r:", errorlevel=2) as members:  # type: ignore[call-overload]
                for count, member in enumerate(members):
                    if count >= MAX_MEMBERS:
                        self._fail(f"it has more than {MAX_MEMBERS} members")
                    name = member.name.removeprefix("./").rstrip("/")
                    if member.isdir() and name in {".", "", "blobs", BLOBS.rstrip("/")}:
                        continue
                    is_blob = name.startswith(BLOBS) and is_digest(PREFIX + name.removeprefix(BLOBS))
                    known = is_blob or name in {LAYOUT_NAME, INDEX_NAME}
                    if not known or not member.isreg() or member.issparse():
                        self._fail(f"{member.name!r:.200} is not a file of an image layout")
                    if name in locations:
                        self._fail(f"{name} is in it twice")
                    locations[name] = member.offset_data, member.size
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            self._fail(str(error))
        except OSError as error:
            raise ArtifactError(f"{self.name}: cannot be read ({error.strerror or error})") from error
        return locations

    def _fail(self, problem: str) -> NoReturn:
        raise ArtifactError(f"{self.name}: not an intact archive of `llmc cache export` ({problem}); export it again")


class _Bounded:
    """A file with bounded reads: tarfile reads an extended header at once, of the size that the file states."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


@contextmanager
def _opened(source: Path | BinaryIO) -> Iterator[ImageArchive]:
    if not isinstance(source, Path):
        name = "the archive on standard input"
        first = _require_tar(source, name)
        with temporary_folder("import") as folder, (folder / "archive").open("w+b") as copy:
            with writing(folder, 0, "set TMPDIR to a larger disk"):
                copy.write(first)
                shutil.copyfileobj(source, copy, tar.PIECE)
                copy.flush()
            yield ImageArchive(copy, name)
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise ArtifactError(f"{source}: the archive cannot be read ({error.strerror})") from error
    with file:
        _require_tar(file, str(source))
        yield ImageArchive(file, str(source))


def _require_tar(file: BinaryIO, name: str) -> bytes:
    """Read the first block of a file or stream. Raises ArtifactError if it is not a tar header or cannot be read."""
    try:
        first = file.read(tar.BLOCK)
    except OSError as error:
        raise ArtifactError(f"{name}: the archive cannot be read ({error.strerror})") from error
    for magic, what in _COMPRESSED.items():
        if first.startswith(magic):
            raise ArtifactError(
                f"{name}: compressed with {what}; decompress it first, as in `{what} -dc FILE | llmc cache import -`"
            )
    try:
        tarfile.TarInfo.frombuf(first, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        raise ArtifactError(f"{name}: not an archive of `llmc cache export` ({error})") from error
    return first


def _content(data: bytes) -> Content:
    return lambda: [data]


def _counted(pieces: Iterable[bytes], total: int, progress: Meter | None) -> Iterator[bytes]:
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece)
        if progress is not None:
            progress(done, total)
