"""The contract of a place for images (a registry, a layout), and the checks of everything that is read from one."""

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
MEND = "push the bundle again, under another name if it stays so"
"""What to do about something damaged: a registry that has a blob is not sent it again."""
Content = Callable[[], Iterable[bytes]]
"""Makes a content anew, in pieces, as often as it has to be sent."""


class BlobSource(Protocol):
    """Where the blobs of images are read."""

    name: str
    """Where it is, without credentials: safe to print."""

    def read(self, blob: Descriptor) -> Generator[bytes, None, None]:
        """The content of a blob, not verified (see `verified`); close it. Raises ArtifactError when it is not there."""
        ...


class Images(BlobSource, Protocol):
    """A place for images. All methods raise RemoteError where it fails, after retrying what may pass."""

    def close(self) -> None:
        """Let go of connections."""
        ...

    def manifest(self, reference: Reference) -> bytes | None:
        """The image manifest that a tag or digest names, None when there is none. A digest is verified.

        Raises ArtifactError for one that is damaged or too large.
        """
        ...

    def has(self, blob: Descriptor) -> bool:
        """Whether a blob is there, with its size."""
        ...

    def add(self, blob: Descriptor, content: Content) -> None:
        """Put a blob there, whole or not at all. Raises ArtifactError for content that is not the blob's."""
        ...

    def publish(self, reference: Reference, manifest: bytes) -> bool:
        """Name a manifest whose blobs are there by the reference's tag; False when that was so before."""
        ...


def verified(
    pieces: Iterable[bytes], blob: Descriptor, origin: str, moved: Progress = lambda _: None
) -> Iterator[bytes]:
    """The same pieces, at most as many bytes as the blob has. At their end, ArtifactError unless they are the blob."""
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


def read_small(images: BlobSource, blob: Descriptor) -> bytes:
    """The content of a small blob, verified."""
    with closing(images.read(blob)) as pieces:
        return b"".join(verified(pieces, blob, images.name))


def read_archive(
    images: BlobSource, blob: Descriptor, diff_id: str, moved: Progress = lambda _: None
) -> Generator[bytes, None, None]:
    """The tar file of a layer, verified at its end, compressed or not; `moved` is told of the bytes that came.

    Close it: that lets go of the connection.
    """
    if blob.media_type != GZIP_TYPE and blob.digest != diff_id:
        raise ArtifactError(f"{images.name}: the config names {diff_id} for layer {blob.digest}; {MEND}")
    with closing(images.read(blob)) as source:
        pieces = verified(source, blob, images.name, moved)
        if blob.media_type == GZIP_TYPE:
            pieces = _unzipped(pieces, diff_id, f"{images.name}: layer {blob.digest}")
        yield from pieces


def _unzipped(pieces: Iterable[bytes], diff_id: str, origin: str) -> Iterator[bytes]:
    """A gzip file's content, decompressed as it is read, so that a reader that stops uses no more memory."""
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
                raise ArtifactError(f"{origin}: more follows after the gzip file; {MEND}")
            hasher.update(out)
            yield out
    if not inflate.eof or PREFIX + hasher.hexdigest() != diff_id:
        raise ArtifactError(f"{origin}: its content is not {diff_id}, which the config names; {MEND}")
