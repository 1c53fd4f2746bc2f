"""Pulling an image: its manifest comes first, then the trust decision, then the missing blobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.manifest_schema import FILE_NAME, MAX_BYTES, SIGNATURE_NAME
from llmc.artifacts.bundle.native import code_of_bundle, code_of_entry
from llmc.artifacts.bundle.reader import MAX_SIGNATURE_BYTES
from llmc.artifacts.bundle.stored import publish_arrived
from llmc.artifacts.bundle.trust import Trust, TrustDecision
from llmc.artifacts.digest import Blob
from llmc.artifacts.oci.base import MEND, ImageBlobSource, Images, read_archive, read_small
from llmc.artifacts.oci.image import CACHE_TYPE, GZIP_TYPE, Descriptor, Image, read_diff_ids, read_image, read_kind
from llmc.artifacts.oci.layers import Layer, read_facts, split
from llmc.artifacts.oci.reference import Reference
from llmc.artifacts.oci.subjects import cache_layer, read_entry
from llmc.artifacts.remotes.base import Meter, Progress, TransferReport
from llmc.artifacts.remotes.ingest import expect
from llmc.artifacts.remotes.ingest import settle as arrived
from llmc.artifacts.remotes.remote_entries import keeps
from llmc.artifacts.remotes.transfers import Mover
from llmc.artifacts.store import leases
from llmc.artifacts.store.entries import MAX_BYTES as MAX_ENTRY
from llmc.artifacts.store.entries import entry_body
from llmc.artifacts.store.workspace import Area
from llmc.errors import ArtifactError

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

MAX_ENTRY_BYTES = MAX_ENTRY + (64 << 10)
MAX_FACTS_BYTES = MAX_BYTES + MAX_SIGNATURE_BYTES + (64 << 10)


class _Arrival(NamedTuple):
    """An accepted image: its facts layer, its other layers, and the function that publishes it once these arrived."""

    facts: Descriptor
    parts: list[_Part]
    settle: Callable[[], Entry]


class _Part(NamedTuple):
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
    size = sum(part.blob.size for part in missing)
    with Mover(jobs, progress) as mover:
        mover.expect(size)
        for future in [mover.run(_fetch, store, images, part, mover.moved) for part in missing]:
            mover.result(future)
    small = [image.config, arrival.facts]
    report = TransferReport(
        entries=1,
        blobs=len(missing) + len(small),
        bytes=size + sum(blob.size for blob in small),
        skipped_blobs=len(arrival.parts) - len(missing),
        skipped_bytes=sum(part.blob.size for part in arrival.parts) - size,
        seconds=time.monotonic() - began,
    )
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


def _match(layers: Sequence[Layer], blobs: Sequence[Descriptor], diff_ids: Sequence[str], origin: str) -> list[_Part]:
    """Pair the layers that a bundle must have with those of the image."""
    if len(layers) != len(blobs):
        raise ArtifactError(
            f"{origin}: its manifest requires {len(layers)} layers of blobs, the image has {len(blobs)}; push it again"
        )
    parts = [_Part(*item) for item in zip(layers, blobs, diff_ids, strict=True)]
    for layer, blob, _ in parts:
        if blob.media_type != GZIP_TYPE and blob.size != layer.size:
            raise ArtifactError(
                f"{origin}: layer {blob.digest} has {blob.size} bytes, the bundle's manifest requires "
                f"{layer.size}; {MEND}"
            )
    return parts


def _fetch(store: Store, images: ImageBlobSource, part: _Part, moved: Progress) -> None:
    """Add the blobs of a layer to the store, each once its digest is verified."""
    origin = f"{images.name}: layer {part.blob.digest}"
    with closing(read_archive(images, part.blob, part.diff_id, moved)) as pieces:
        for blob, content in part.layer.read(pieces, origin):
            with store.writer() as stream:
                for piece in content:
                    stream.write(piece)
                if stream.digest != blob.digest:
                    raise ArtifactError(f"{origin}: {blob.digest} is damaged, it has digest {stream.digest}; {MEND}")
