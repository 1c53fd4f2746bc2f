"""Pushing a bundle or packed cache: existing blobs are not sent, and the image is named last."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from llmc.artifacts.digest import PREFIX, digest_bytes
from llmc.artifacts.oci.base import Content, Images
from llmc.artifacts.oci.image import CONFIG_TYPE, GZIP_TYPE, LAYER_TYPE, Descriptor, describe, write_config, write_image
from llmc.artifacts.oci.layers import Layer
from llmc.artifacts.oci.reference import Reference
from llmc.artifacts.oci.stored_gzip import wrap
from llmc.artifacts.oci.subjects import subject_of
from llmc.artifacts.oci.tar import PIECE
from llmc.artifacts.remotes.base import Meter, Progress, TransferReport
from llmc.artifacts.remotes.transfers import Mover
from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.remotes.push import Signs
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store


class ImagePart(NamedTuple):
    """A blob of an image; `diff_id` is the digest of a layer's tar file, which may be in a gzip file."""

    blob: Descriptor
    content: Content
    diff_id: str


class Built(NamedTuple):
    """A built image: its artifactType, its manifest, and its blobs (layers, then the config)."""

    kind: str
    manifest: bytes
    parts: list[ImagePart]


def build(store: Store, entry: Entry, signer: Signs | None, mover: Mover) -> Built:
    """Build the image of a bundle or packed cache; its blobs are read once, for their digests.

    Raises ArtifactError for an entry of another kind, or a damaged one.
    """
    subject = subject_of(store, entry, signer)
    facts = ImagePart(describe(LAYER_TYPE, subject.facts), lambda: [subject.facts], digest_bytes(subject.facts))
    described = [mover.run(_describe, store, layer) for layer in subject.layers]
    built = list(map(mover.result, described))
    layers = [facts, *built] if subject.facts_first else [*built, facts]
    config = write_config(subject.architecture, subject.labels, [layer.diff_id for layer in layers])
    last = ImagePart(describe(CONFIG_TYPE, config), lambda: [config], "")
    manifest = write_image(subject.kind, subject.annotations, last.blob, [layer.blob for layer in layers])
    return Built(subject.kind, manifest, [*layers, last])


def push(
    store: Store, entry: Entry, images: Images, reference: Reference, *, jobs: int, signer: Signs | None,
    progress: Meter | None,
) -> TransferReport:  # fmt: skip
    """Push the image of an entry, as `push_image` describes."""
    began = time.monotonic()
    with Mover(jobs, progress) as mover:
        _, image, parts = build(store, entry, signer, mover)
        if reference.digest not in {None, digest_bytes(image)}:
            raise InputError(f"{reference}: its image is {digest_bytes(image)}; push it to a tag")
        looking = [mover.run(images.has, part.blob) for part in parts]
        missing = [part for part, found in zip(parts, map(mover.result, looking), strict=True) if not found]
        size = sum(part.blob.size for part in missing)
        mover.expect(size)
        for future in [mover.run(_send, images, part, mover.moved) for part in missing]:
            mover.result(future)
    changed = images.publish(reference, image)
    return TransferReport(
        entries=int(changed),
        blobs=len(missing),
        bytes=size,
        skipped_blobs=len(parts) - len(missing),
        skipped_bytes=sum(part.blob.size for part in parts) - size,
        seconds=time.monotonic() - began,
    )


def _send(images: Images, part: ImagePart, moved: Progress) -> None:
    sent = 0

    def content() -> Iterator[bytes]:
        nonlocal sent
        moved(-sent)  # sent by an earlier attempt
        sent = 0
        for piece in part.content():
            moved(len(piece))
            sent += len(piece)
            yield piece

    images.add(part.blob, content)


def _describe(store: Store, layer: Layer) -> ImagePart:
    """Return a layer's descriptor, computed by reading its blobs, and its content."""

    def archive() -> Iterator[bytes]:
        return layer.write(lambda blob: _read(store, blob))

    def content() -> Iterator[bytes]:
        return wrap(archive()) if layer.zipped else archive()

    inner, packed, size = hashlib.sha256(), hashlib.sha256(), 0

    def read() -> Iterator[bytes]:
        for piece in archive():
            inner.update(piece)
            yield piece

    for piece in wrap(read()) if layer.zipped else read():
        packed.update(piece)
        size += len(piece)
    media_type = GZIP_TYPE if layer.zipped else LAYER_TYPE
    return ImagePart(Descriptor(media_type, PREFIX + packed.hexdigest(), size), content, PREFIX + inner.hexdigest())


def _read(store: Store, blob: Blob) -> Iterable[bytes]:
    path = store.path(blob)
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                yield piece
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
