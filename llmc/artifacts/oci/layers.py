"""Layers, and which blobs of a bundle share one. Only the blobs decide, so bundles that share blobs share layers.

    layers = own* group* facts
    own    = one blob of at least OWN_FROM · 2^k bytes, with the least k for which there are at most MAX_OWN of them;
             the largest first, so that bundles with the same weights begin with the same layers: container engines
             store a chain of layers once
    group  = the smaller blobs whose digests begin with the same hex digit, by digest: one more or less changes one
             of 16 layers
    facts  = manifest.json, [signature.json]

Every layer except the facts also has the folders blobs/ and blobs/sha256/. There are at most 127 layers, the limit of
container engines. Readers follow these rules too, so changing them requires a new image.ARTIFACT_TYPE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from llmc.artifacts.bundle.manifest_schema import FILE_NAME, SIGNATURE_NAME
from llmc.artifacts.digest import PREFIX, Blob, parse
from llmc.artifacts.oci import tar

OWN_FROM = 1 << 20
MAX_OWN = 110
MAX_LAYERS = MAX_OWN + 16 + 1
FOLDERS = ("blobs/", "blobs/sha256/")
FACTS = (FILE_NAME, SIGNATURE_NAME)


class Layer(NamedTuple):
    """Folders, and files with their blobs, in archive order; a `zipped` layer is a gzip file (stored_gzip.py)."""

    folders: tuple[str, ...]
    files: tuple[tuple[tar.Member, Blob], ...]
    folder_mode: int = tar.FOLDER_MODE
    zipped: bool = False

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The blobs of the files."""
        return tuple(blob for _, blob in self.files)

    @property
    def size(self) -> int:
        """Size of the archive in bytes."""
        return tar.archive_size(self.folders, (member for member, _ in self.files))

    def write(self, content: Callable[[Blob], Iterable[bytes]]) -> Iterator[bytes]:
        """Yield the archive in pieces; `content` returns the content of a blob."""
        return tar.write(self.folders, ((member, content(blob)) for member, blob in self.files), self.folder_mode)

    def read(self, pieces: Iterable[bytes], origin: str) -> Iterator[tuple[Blob, Iterator[bytes]]]:
        """Yield the blobs in an archive with their unverified content; consume all of each.

        Raises ArtifactError for anything but the archive of this layer.
        """
        archive = tar.Reader(pieces, origin)
        archive.folders(self.folders, self.folder_mode)
        for member, blob in self.files:
            yield blob, archive.file(member)
        archive.end()


def of_blobs(blobs: Iterable[Blob]) -> Layer:
    """Return a layer of blobs of a bundle."""
    return Layer(FOLDERS, tuple((tar.Member(FOLDERS[-1] + parse(blob.digest), blob.size), blob) for blob in blobs))


def split(blobs: Mapping[str, int]) -> list[Layer]:
    """Return the layers of a bundle's blobs (digests and sizes), without the facts layer."""
    everything = sorted((Blob(*item) for item in blobs.items()), key=lambda blob: (-blob.size, blob.digest))
    threshold = OWN_FROM
    while sum(blob.size >= threshold for blob in everything) > MAX_OWN:
        threshold *= 2
    groups: dict[str, list[Blob]] = {}
    for blob in sorted(blob for blob in everything if blob.size < threshold):
        groups.setdefault(blob.digest[len(PREFIX)], []).append(blob)
    own = [of_blobs([blob]) for blob in everything if blob.size >= threshold]
    return [*own, *(of_blobs(groups[digit]) for digit in sorted(groups))]


def write_facts(manifest: bytes, signature: bytes | None) -> bytes:
    """Return the archive of a bundle's manifest and signature."""
    files = [(name, data) for name, data in zip(FACTS, (manifest, signature), strict=True) if data is not None]
    return b"".join(tar.write((), ((tar.Member(name, len(data)), [data]) for name, data in files)))


def read_facts(pieces: Iterable[bytes], origin: str, limit: int) -> dict[str, bytes]:
    """Return the files of a bundle's facts layer. Raises ArtifactError if it is not one."""
    return tar.Reader(pieces, origin).small_files(FACTS, limit)
