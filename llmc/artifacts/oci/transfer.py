"""Pushing and pulling images: only missing blobs are moved.

A push names the image last. A pull reads the manifest first, then decides on trust, then fetches the blobs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from llmc.artifacts.bundle.manifest import FILE_NAME, MAX_BYTES, SIGNATURE_NAME, Manifest
from llmc.artifacts.bundle.reader import MAX_SIGNATURE_BYTES
from llmc.artifacts.bundle.stored import publish_arrived
from llmc.artifacts.bundle.trust import Trust, TrustDecision, code_of_bundle, code_of_entry
from llmc.artifacts.digest import PREFIX, Blob, digest_bytes
from llmc.artifacts.oci.base import MEND, Content, ImageBlobSource, Images, read_archive, read_small
from llmc.artifacts.oci.image import (
    CACHE_TYPE,
    CONFIG_TYPE,
    GZIP_TYPE,
    LAYER_TYPE,
    Descriptor,
    Image,
    Layer,
    cache_layer,
    describe,
    read_diff_ids,
    read_entry,
    read_facts,
    read_image,
    read_kind,
    split,
    subject_of,
    write_config,
    write_image,
)
from llmc.artifacts.oci.reference import Reference
from llmc.artifacts.oci.tar import PIECE, gzipped
from llmc.artifacts.remotes.base import Meter, Progress, TransferReport
from llmc.artifacts.remotes.ingest import expect, keeps
from llmc.artifacts.remotes.ingest import settle as arrived
from llmc.artifacts.remotes.mover import Mover
from llmc.artifacts.remotes.transfer import Signs
from llmc.artifacts.store import leases
from llmc.artifacts.store.entries import MAX_BYTES as MAX_ENTRY
from llmc.artifacts.store.entries import Entry, entry_body
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Area
from llmc.errors import ArtifactError, InputError


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
        mover.expect(sum(part.blob.size for part in missing))
        for future in [mover.run(_send, images, part, mover.moved) for part in missing]:
            mover.result(future)
    changed = images.publish(reference, image)
    there = [part.blob.size for part in parts if part not in missing]
    return TransferReport.of(began, int(changed), [part.blob.size for part in missing], there)


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
    def archive() -> Iterator[bytes]:
        return layer.write(lambda blob: _read_pieces(store, blob))

    def content() -> Iterator[bytes]:
        return gzipped(archive()) if layer.zipped else archive()

    inner, packed, size = hashlib.sha256(), hashlib.sha256(), 0

    def read() -> Iterator[bytes]:
        for piece in archive():
            inner.update(piece)
            yield piece

    for piece in gzipped(read()) if layer.zipped else read():
        packed.update(piece)
        size += len(piece)
    media_type = GZIP_TYPE if layer.zipped else LAYER_TYPE
    return ImagePart(Descriptor(media_type, PREFIX + packed.hexdigest(), size), content, PREFIX + inner.hexdigest())


def _read_pieces(store: Store, blob: Blob) -> Iterable[bytes]:
    path = store.path(blob)
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                yield piece
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error


MAX_ENTRY_BYTES = MAX_ENTRY + (64 << 10)
MAX_FACTS_BYTES = MAX_BYTES + MAX_SIGNATURE_BYTES + (64 << 10)


class _Arrival(NamedTuple):
    """An accepted image: its facts layer, its other layers, and the function that publishes it once these arrived."""

    facts: Descriptor
    parts: list[_LayerPart]
    settle: Callable[[], Entry]


class _LayerPart(NamedTuple):
    """A layer of the image: its required content, its descriptor, and its uncompressed digest."""

    layer: Layer
    blob: Descriptor
    diff_id: str


def pull(
    store: Store, images: Images, reference: Reference, *, trust: Trust, jobs: int, progress: Meter | None,
    bundles_only: bool = False,
) -> tuple[Entry, TransferReport]:  # fmt: skip
    """Pull the image that `reference` names, as `pull_image` describes."""
    manifest = images.manifest(reference)
    if manifest is None:
        raise ArtifactError(f"{reference}: no such bundle or cache; check the tag")
    return receive(
        store, images, manifest, str(reference), trust=trust, jobs=jobs, progress=progress, bundles_only=bundles_only
    )  # fmt: skip


def receive(
    store: Store, images: ImageBlobSource, manifest: bytes, origin: str, *, trust: Trust, jobs: int,
    progress: Meter | None, bundles_only: bool = False,
) -> tuple[Entry, TransferReport]:  # fmt: skip
    """Add the image of a manifest to the store, as `pull_image` describes; `origin` names it in errors."""
    began = time.monotonic()
    image = read_image(manifest, origin)
    config = read_small(images, image.config)
    diff_ids = read_diff_ids(config, len(image.layers), origin)
    kind = read_kind(image, config, origin)
    if kind == CACHE_TYPE and bundles_only:
        raise ArtifactError(f"{origin}: a packed cache of another server, not a bundle; use `llmc cache unpack`")
    read = _read_cache if kind == CACHE_TYPE else _read_bundle
    arrival = read(store, images, image, diff_ids, origin, trust)
    missing = [part for part in arrival.parts if not all(store.is_intact(blob) for blob in part.layer.blobs)]
    with Mover(jobs, progress) as mover:
        mover.expect(sum(part.blob.size for part in missing))
        for future in [mover.run(_fetch, store, images, part, mover.moved) for part in missing]:
            mover.result(future)
    moved = [blob.size for blob in (image.config, arrival.facts, *(part.blob for part in missing))]
    there = [part.blob.size for part in arrival.parts if part not in missing]
    report = TransferReport.of(began, 1, moved, there)
    return arrival.settle(), report


def _read_bundle(
    store: Store, images: ImageBlobSource, image: Image, diff_ids: Sequence[str], origin: str, trust: Trust
) -> _Arrival:  # fmt: skip
    manifest, signature = _read_facts(images, image.layers[-1], diff_ids[-1], origin)
    native = code_of_bundle(manifest) is not None
    admission = TrustDecision(trust, manifest.to_bytes(), signature, native=native, origin=origin)

    def settle() -> Entry:
        admission.examine(store.path(Blob(*blob), verify=False) for blob in manifest.blobs.items())
        return publish_arrived(store, manifest, signature, vouched=admission.signer is not None)[0]

    store.hold(*map(leases.blob_name, manifest.blobs))  # until the bundle's entry names them
    parts = _match(split(manifest.blobs), image.layers[:-1], diff_ids[:-1], origin)
    return _Arrival(image.layers[-1], parts, settle)


def _read_cache(
    store: Store, images: ImageBlobSource, image: Image, diff_ids: Sequence[str], origin: str, trust: Trust
) -> _Arrival:  # fmt: skip
    facts = image.layers[0]
    if facts.size > MAX_ENTRY_BYTES:
        raise ArtifactError(f"{origin}: its first layer has {facts.size} bytes, too many for an entry")
    with closing(read_archive(images, facts, diff_ids[0])) as pieces:
        entry, contents = read_entry(pieces, f"{origin}: layer {facts.digest}")
    native = code_of_entry(entry.key, entry.meta) is not None
    admission = TrustDecision(trust, entry_body(entry), entry.envelope, native=native, origin=origin)
    area = Area(store.root)
    expect(area, [entry])

    def settle() -> Entry:
        there = area.entries.read(entry.key)
        return there if there is not None and keeps(there, entry) else arrived(area, entry, admission, store.locate)

    return _Arrival(facts, _match([cache_layer(contents)], image.layers[1:], diff_ids[1:], origin), settle)


def _read_facts(images: ImageBlobSource, blob: Descriptor, diff_id: str, origin: str) -> tuple[Manifest, bytes | None]:
    if blob.size > MAX_FACTS_BYTES:
        raise ArtifactError(f"{origin}: its last layer has {blob.size} bytes, too many for a bundle's manifest")
    with closing(read_archive(images, blob, diff_id)) as pieces:
        facts = read_facts(pieces, f"{origin}: layer {blob.digest}", MAX_BYTES)
    if FILE_NAME not in facts:
        raise ArtifactError(f"{origin}: its last layer has no {FILE_NAME}; not a bundle of llmc")
    manifest = Manifest.from_bytes(facts[FILE_NAME], origin)
    if manifest.to_bytes() != facts[FILE_NAME]:
        raise ArtifactError(f"{origin}: its {FILE_NAME} is not written as llmc writes it; {MEND}")
    signature = facts.get(SIGNATURE_NAME)
    if signature is not None and len(signature) > MAX_SIGNATURE_BYTES:
        raise ArtifactError(f"{origin}: its signature is larger than a signature can be ({MAX_SIGNATURE_BYTES} bytes)")
    return manifest, signature


def _match(
    layers: Sequence[Layer], blobs: Sequence[Descriptor], diff_ids: Sequence[str], origin: str
) -> list[_LayerPart]:
    if len(layers) != len(blobs):
        raise ArtifactError(
            f"{origin}: its manifest requires {len(layers)} layers of blobs, the image has {len(blobs)}; push it again"
        )
    parts = [_LayerPart(*item) for item in zip(layers, blobs, diff_ids, strict=True)]
    for layer, blob, _ in parts:
        if blob.media_type != GZIP_TYPE and blob.size != layer.size:
            raise ArtifactError(
                f"{origin}: layer {blob.digest} has {blob.size} bytes, the bundle's manifest requires "
                f"{layer.size}; {MEND}"
            )
    return parts


def _fetch(store: Store, images: ImageBlobSource, part: _LayerPart, moved: Progress) -> None:
    origin = f"{images.name}: layer {part.blob.digest}"
    with closing(read_archive(images, part.blob, part.diff_id, moved)) as pieces:
        for blob, content in part.layer.read(pieces, origin):
            with store.writer() as stream:
                for piece in content:
                    stream.write(piece)
                if stream.digest != blob.digest:
                    raise ArtifactError(f"{origin}: {blob.digest} is damaged, it has digest {stream.digest}; {MEND}")
