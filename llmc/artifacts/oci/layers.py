"""Layers, and which blobs of a bundle share one: the blobs alone decide, so bundles that share blobs share layers.

    layers = own* group* facts
    own    = one blob of at least OWN_FROM · 2^k bytes, with the least k for which there are at most MAX_OWN of them;
             the largest first, so that bundles with the same weights begin with the same layers: what unpacks images
             keeps a chain of layers once
    group  = the smaller blobs whose digests begin with the same hex digit, by digest: one more or less changes one
             of 16 layers
    facts  = manifest.json, [signature.json]

Every layer but the facts also has the folders blobs/ and blobs/sha256/. There are at most 127 layers, which is what
container engines take. A change to these rules is a change of image.ARTIFACT_TYPE: readers follow them too.
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
    """Folders, and files with their blobs, in the order of the archive; `zipped` in a gzip file (stored_gzip.py)."""

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
        """Bytes of the archive."""
        return tar.archive_size(self.folders, (member for member, _ in self.files))

    def write(self, content: Callable[[Blob], Iterable[bytes]]) -> Iterator[bytes]:
        """The archive, in pieces, given the content of its blobs."""
        return tar.write(self.folders, ((member, content(blob)) for member, blob in self.files), self.folder_mode)

    def read(self, pieces: Iterable[bytes], origin: str) -> Iterator[tuple[Blob, Iterator[bytes]]]:
        """The blobs in an archive, with their content, which is not verified here; take all of each.

        Raises ArtifactError where it is anything but the archive of this layer.
        """
        archive = tar.Reader(pieces, origin)
        archive.folders(self.folders, self.folder_mode)
        for member, blob in self.files:
            yield blob, archive.file(member)
        archive.end()


def of_blobs(blobs: Iterable[Blob]) -> Layer:
    """A layer of blobs of a bundle."""
    return Layer(FOLDERS, tuple((tar.Member(FOLDERS[-1] + parse(blob.digest), blob.size), blob) for blob in blobs))


def split(blobs: Mapping[str, int]) -> list[Layer]:
    """The layers of a bundle's blobs (digests and sizes), but for the last one, of the facts."""
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
    """The archive of a bundle's manifest and signature."""
    files = [(name, data) for name, data in zip(FACTS, (manifest, signature), strict=True) if data is not None]
    return b"".join(tar.write((), ((tar.Member(name, len(data)), [data]) for name, data in files)))


def read_facts(pieces: Iterable[bytes], origin: str, limit: int) -> dict[str, bytes]:
    """The files of a bundle's last layer. Raises ArtifactError where it is not one."""
    return tar.Reader(pieces, origin).small_files(FACTS, limit)
