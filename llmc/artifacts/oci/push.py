"""Pushing a bundle: what the place has is not sent, and the image is named last."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from llmc.artifacts.bundle.stored import read_bundle
from llmc.artifacts.digest import PREFIX, digest_bytes
from llmc.artifacts.oci.base import Content, Images
from llmc.artifacts.oci.image import CONFIG_TYPE, LAYER_TYPE, Descriptor, describe, write_config, write_image
from llmc.artifacts.oci.layers import Layer, split, write_facts
from llmc.artifacts.oci.reference import Reference
from llmc.artifacts.oci.tar import PIECE
from llmc.artifacts.remotes.base import Meter, Progress, TransferReport
from llmc.artifacts.remotes.transfers import Mover
from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.remotes.push import Signs
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store


class _Part(NamedTuple):
    blob: Descriptor
    content: Content


def push(
    store: Store, entry: Entry, images: Images, reference: Reference, *, jobs: int, signer: Signs | None,
    progress: Meter | None,
) -> TransferReport:  # fmt: skip
    """See `push_bundle`."""
    began = time.monotonic()
    manifest, signature = read_bundle(store, entry)
    facts = manifest.to_bytes()
    if signer is not None:
        signature = signer.sign(facts, signature)
    last = write_facts(facts, signature)
    with Mover(jobs, progress) as mover:
        described = [mover.run(_describe, store, layer) for layer in split(manifest.blobs)]
        layers = [*map(mover.result, described), _Part(describe(LAYER_TYPE, last), lambda: [last])]
        config = write_config(manifest, [layer.blob.digest for layer in layers])
        parts = [*layers, _Part(describe(CONFIG_TYPE, config), lambda: [config])]
        image = write_image(manifest, parts[-1].blob, [layer.blob for layer in layers])
        if reference.digest not in {None, digest_bytes(image)}:
            raise InputError(f"{reference}: the bundle's image is {digest_bytes(image)}; push it to a tag")
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


def _send(images: Images, part: _Part, moved: Progress) -> None:
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


def _describe(store: Store, layer: Layer) -> _Part:
    """A layer's descriptor, for which its blobs are read, and its content."""

    def content() -> Iterator[bytes]:
        return layer.write(lambda blob: _read(store, blob))

    hasher = hashlib.sha256()
    for piece in content():
        hasher.update(piece)
    return _Part(Descriptor(LAYER_TYPE, PREFIX + hasher.hexdigest(), layer.size), content)


def _read(store: Store, blob: Blob) -> Iterable[bytes]:
    path = store.path(blob)
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                yield piece
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
