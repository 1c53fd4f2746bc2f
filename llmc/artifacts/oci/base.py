"""The contract of an image location (a registry, a layout), and the verification of everything read from one."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Protocol

from llmc.artifacts.digest import PREFIX
from llmc.artifacts.oci.image import GZIP_TYPE, Descriptor
from llmc.artifacts.oci.reference import Reference
from llmc.artifacts.oci.tar import PIECE
from llmc.artifacts.remotes.base import Progress
from llmc.errors import ArtifactError

GZIP_WINDOW = 31
MEND = "push the bundle again, under another name if that does not help"
"""Remedy for damaged content. Another name helps because a blob that a registry has is not sent to it again."""
Content = Callable[[], Iterable[bytes]]
"""Produces the same content, in pieces, each time it must be sent."""


class ImageBlobSource(Protocol):
    """A source of image blobs."""

    name: str
    """Its location without credentials: safe to print."""

    def read(self, blob: Descriptor) -> Generator[bytes, None, None]:
        """Yield the unverified content of a blob (see `verified`); close it. Raises ArtifactError if it is missing."""


class Images(ImageBlobSource, Protocol):
    """An image location. All methods raise RemoteError if it fails, after retrying temporary failures."""

    def close(self) -> None:
        """Close connections."""

    def manifest(self, reference: Reference) -> bytes | None:
        """Return the image manifest that a tag or digest names, or None. A digest is verified.

        Raises ArtifactError for a manifest that is damaged or too large.
        """

    def has(self, blob: Descriptor) -> bool:
        """Whether the blob exists with its size."""

    def add(self, blob: Descriptor, content: Content) -> None:
        """Store a blob, whole or not at all. Raises ArtifactError if `content` is not the blob's."""

    def publish(self, reference: Reference, manifest: bytes) -> bool:
        """Point the reference's tag at a manifest whose blobs exist; return False if it did before."""


def verified(
    pieces: Iterable[bytes], blob: Descriptor, origin: str, moved: Progress = lambda _: None
) -> Iterator[bytes]:
    """Yield the same pieces, at most the blob's size. Raises ArtifactError at their end unless they are the blob."""
    hasher = hashlib.sha256()
    left = blob.size
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise ArtifactError(f"{origin}: {blob.digest} is larger than the {blob.size} bytes it should have")
        hasher.update(piece)
        moved(len(piece))
        yield piece
    found = PREFIX + hasher.hexdigest()
    if left or found != blob.digest:
        raise ArtifactError(
            f"{origin}: {blob.digest} is damaged: {blob.size - left} of {blob.size} bytes, with digest {found}; {MEND}"
        )


def read_small(images: ImageBlobSource, blob: Descriptor) -> bytes:
    """Return the verified content of a small blob."""
    with closing(images.read(blob)) as pieces:
        return b"".join(verified(pieces, blob, images.name))


def read_archive(
    images: ImageBlobSource, blob: Descriptor, diff_id: str, moved: Progress = lambda _: None
) -> Generator[bytes, None, None]:
    """Yield the tar file of a layer, compressed or not, verified at its end; `moved` is called with the bytes received.

    Close it to release the connection.
    """
    if blob.media_type != GZIP_TYPE and blob.digest != diff_id:
        raise ArtifactError(f"{images.name}: the config names {diff_id} for layer {blob.digest}; {MEND}")
    with closing(images.read(blob)) as source:
        pieces = verified(source, blob, images.name, moved)
        if blob.media_type == GZIP_TYPE:
            pieces = _unzipped(pieces, diff_id, f"{images.name}: layer {blob.digest}")
        yield from pieces


def _unzipped(pieces: Iterable[bytes], diff_id: str, origin: str) -> Iterator[bytes]:
    """Decompress a gzip file as it is read, so that a reader that stops uses no more memory."""
    hasher = hashlib.sha256()
    inflate = zlib.decompressobj(GZIP_WINDOW)
    for piece in pieces:
        data = piece
        while data:
            try:
                out = inflate.decompress(data, PIECE)
            except zlib.error as error:
                raise ArtifactError(f"{origin}: not a gzip file ({error}); {MEND}") from error
            data = inflate.unconsumed_tail
            if inflate.unused_data:
                raise ArtifactError(f"{origin}: data follows the gzip file; {MEND}")
            hasher.update(out)
            yield out
    if not inflate.eof or PREFIX + hasher.hexdigest() != diff_id:
        raise ArtifactError(f"{origin}: its content is not {diff_id}, which the config names; {MEND}")
