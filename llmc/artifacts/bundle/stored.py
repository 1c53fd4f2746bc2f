"""Bundles in a store: an entry of kind "bundle", whose key is the manifest's digest.

    outputs = {"manifest.json": blob, ["signature.json": blob,] digest: blob of the manifest, …}

So bundles are listed, counted, pinned, collected, pushed and exported like any other entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.bundle.manifest import FILE_NAME, SIGNATURE_NAME, Manifest
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.key import Key
from llmc.artifacts.log import logger
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.artifacts.store.leases import bundle_name, entry_name
from llmc.errors import ArtifactError, CapacityError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

KIND = "bundle"


def bundle_key(manifest: Manifest) -> Key:
    """Return a bundle's key, which depends only on the manifest's digest."""
    return Key(KIND, {"manifest": manifest.digest})


def bundle_meta(manifest: Manifest) -> dict[str, Any]:
    """Return facts about a bundle for lists of entries."""
    return {
        "model": str(manifest.model.get("name", "")),
        "device": manifest.device,
        "target": manifest.target,
        "executables": len(manifest.executables),
        "llmc": manifest.llmc,
    }


def bundle_outputs(manifest: Manifest, signature: bytes | None) -> dict[str, Blob]:
    """Return the outputs of a bundle's entry."""
    outputs = {digest: Blob(digest, size) for digest, size in manifest.blobs.items()}
    for name, content in ((FILE_NAME, manifest.to_bytes()), (SIGNATURE_NAME, signature)):
        if content is not None:
            outputs[name] = Blob(digest_bytes(content), len(content))
    return outputs


def publish_bundle(store: Store, manifest: Manifest, signature: bytes | None = None) -> Entry:
    """Publish a bundle whose blobs are in the store.

    Raises BlobMissingError for a missing blob, CapacityError or UnwritableError if the store cannot be written.
    """
    for content in (manifest.to_bytes(), signature):
        if content is not None:
            store.put_bytes(content)
    return store.publish(bundle_key(manifest), bundle_outputs(manifest, signature), bundle_meta(manifest))


def publish_arrived(store: Store, manifest: Manifest, signature: bytes | None, vouched: bool) -> tuple[Entry, bool]:
    """Publish a received bundle that the store may already have; return its entry and whether it is new.

    A stored signature is replaced only by one that is `vouched` for: by a trusted key, or because it comes from the
    user's own folder.
    """
    entry = store.lookup(bundle_key(manifest))
    if entry is None:
        return publish_bundle(store, manifest, signature), True
    if signature is not None and (vouched or SIGNATURE_NAME not in entry.outputs):
        return publish_bundle(store, manifest, signature), False
    return entry, False


def remember_bundle(store: Store, manifest: Manifest) -> None:
    """Publish a bundle that was built from this store's blobs; only log if the store has no room."""
    try:
        publish_arrived(store, manifest, None, vouched=False)
    except (BlobMissingError, CapacityError, UnwritableError) as error:
        logger().info("the bundle is not listed in the store: %s", error)


def add_bundle(store: Store, files: BundleFiles) -> Entry:
    """Add a bundle folder to the store. Blobs that the store has are skipped, others are linked where possible.

    The folder's signature, if it has one, replaces the stored one. Raises ArtifactError if the bundle is damaged,
    CapacityError or UnwritableError as `Store.put_bytes` does.
    """
    for digest, size in files.manifest.blobs.items():
        if not store.has(Blob(digest, size)):
            store.put_file(files.path(digest), link=True)
    return publish_arrived(store, files.manifest, files.signature, vouched=True)[0]


def read_bundle(store: Store, entry: Entry) -> tuple[Manifest, bytes | None]:
    """Return the manifest and the signature file of a bundle's entry.

    Raises ArtifactError if the entry is not a bundle's or does not match its manifest, BlobMissingError for a missing
    blob.
    """
    if entry.key.kind != KIND or FILE_NAME not in entry.outputs:
        raise ArtifactError(f"{entry.key.kind} {entry.key.short} in {store.root} is not a bundle")
    source = f"{store.root}: bundle {entry.key.short}"
    manifest = Manifest.from_bytes(store.get_bytes(entry.outputs[FILE_NAME].digest), source)
    signed = entry.outputs.get(SIGNATURE_NAME)
    signature = None if signed is None else store.get_bytes(signed.digest)
    require_agreement(entry, manifest, signature, source)
    return manifest, signature


def require_agreement(entry: Entry, manifest: Manifest, signature: bytes | None, source: str) -> None:
    """Raise ArtifactError unless an entry, which may come from anywhere, matches this manifest."""
    if entry.key != bundle_key(manifest) or dict(entry.outputs) != bundle_outputs(manifest, signature):
        raise ArtifactError(f"{source}: the entry does not match the manifest it names; delete it, or push it again")


def checkout(store: Store, entry: Entry, dest: str | Path | None = None) -> Path:
    """Write the bundle of an entry as a folder and return the folder.

    Without `dest`, that is a folder in the store, created once, whose blobs are links to the store's. Raises as
    `read_bundle` and `write_bundle` do.
    """
    manifest, signature = read_bundle(store, entry)
    folder = store.layout.bundles / entry.key.hex if dest is None else Path(dest)
    if dest is None:
        store.hold(bundle_name(folder), entry_name(entry.key))
    sources: Mapping[str, Path] = {digest: store.path(Blob(digest, size)) for digest, size in manifest.blobs.items()}
    return write_bundle(folder, manifest, sources, signature)
