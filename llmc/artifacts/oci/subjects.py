"""The content of an image: a bundle or a packed cache.

    bundle   layers of blobs (layers.py), then a layer with manifest.json and the signature
    cache    a layer with the entry, signature included, then one gzip layer with the tree as it is: mounted, its
             folder is what the server reads. Tools that know KServe's caches take the last layer

The facts layer describes the other layers byte for byte and is small: it is read, and its signature checked, first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from llmc.artifacts.bundle.stored import KIND, read_bundle
from llmc.artifacts.oci import tar
from llmc.artifacts.oci.image import ARTIFACT_TYPE, CACHE_TYPE, EPOCH, TYPE_LABEL, architecture
from llmc.artifacts.oci.layers import Layer, split, write_facts
from llmc.artifacts.store.entries import MAX_BYTES, Entry, decode_entry, encode_entry, entry_body
from llmc.artifacts.third_party.contents import KIND as CACHE
from llmc.artifacts.third_party.contents import Contents, read_contents
from llmc.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.remotes.push import Signs
    from llmc.artifacts.store.store import Store

ENTRY = "llmc-entry.json"
FOLDER_MODE, FILE_MODE, EXECUTABLE_MODE = 0o755, 0o644, 0o755


class Subject(NamedTuple):
    """The content to push: its layers, the archive of its facts (before or after them), and the image's metadata."""

    kind: str
    layers: tuple[Layer, ...]
    facts: bytes
    facts_first: bool
    architecture: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def subject_of(store: Store, entry: Entry, signer: Signs | None) -> Subject:
    """Return the subject of an entry, signed by `signer`. Raises ArtifactError if it is damaged or of another kind."""
    if entry.key.kind != KIND:
        return _of_cache(entry, f"{store.root}: {entry.key.kind} {entry.key.short}", signer)
    manifest, signature = read_bundle(store, entry)
    content = manifest.to_bytes()
    if signer is not None:
        signature = signer.sign(content, signature)
    facts = write_facts(content, signature)
    layers = tuple(split(manifest.blobs))
    return Subject(ARTIFACT_TYPE, layers, facts, False, architecture(manifest.isa), {}, _annotations(manifest))


def _annotations(manifest: Manifest) -> dict[str, str]:
    model = str(manifest.model.get("name", ""))
    return {
        "org.opencontainers.image.title": model,
        "org.opencontainers.image.version": manifest.llmc,
        "org.opencontainers.image.created": EPOCH,
        "dev.llmc.device": manifest.device,
        "dev.llmc.model": model,
        "dev.llmc.bundle": manifest.digest,
    }


def _of_cache(entry: Entry, origin: str, signer: Signs | None) -> Subject:
    if entry.key.kind != CACHE:
        raise ArtifactError(f"{origin} is neither a bundle nor a packed cache: only these can be images")
    contents = read_contents(entry, origin)
    if signer is not None:
        entry = entry._replace(signature=json.loads(signer.sign(entry_body(entry), entry.envelope)))
    document = encode_entry(entry)
    facts = b"".join(tar.write((), [(tar.Member(ENTRY, len(document)), [document])]))
    annotations = {
        "org.opencontainers.image.title": f"{contents.cache} cache",
        "org.opencontainers.image.created": EPOCH,
        "dev.llmc.cache": contents.cache,
        "dev.llmc.entry": entry.key.digest,
    }
    labels = {**contents.image_labels, TYPE_LABEL: CACHE_TYPE}
    machine = architecture([contents.facts.get("machine", "")])
    return Subject(CACHE_TYPE, (cache_layer(contents),), facts, True, machine, labels, annotations)


def cache_layer(contents: Contents) -> Layer:
    """Return the layer with a cache's tree."""
    root = contents.image_folder
    files = {
        f"{root}/{path}": (file.blob, EXECUTABLE_MODE if file.executable else FILE_MODE)
        for path, file in contents.files.items()
    }
    files |= {path: (blob, FILE_MODE) for path, blob in contents.image_files.items()}
    folders = {parent for path in files for parent in _parents(path)}
    folders |= {parent for path in contents.folders for parent in _parents(f"{root}/{path}/")}
    members = tuple((tar.Member(path, blob.size, mode), blob) for path, (blob, mode) in sorted(files.items()))
    return Layer(tuple(sorted(folders)), members, FOLDER_MODE, zipped=True)


def read_entry(pieces: Iterable[bytes], origin: str) -> tuple[Entry, Contents]:
    """Return the packed cache in a facts layer. Raises ArtifactError."""
    found = tar.Reader(pieces, origin).small_files((ENTRY,), MAX_BYTES)
    if ENTRY not in found:
        raise ArtifactError(f"{origin}: it has no {ENTRY}; not a packed cache of llmc")
    try:
        entry = decode_entry(found[ENTRY])
    except ValueError as error:
        raise ArtifactError(f"{origin}: {ENTRY} is not an entry ({error}); push the cache again") from error
    if encode_entry(entry) != found[ENTRY]:
        raise ArtifactError(f"{origin}: {ENTRY} is not written as llmc writes it; push the cache again")
    return entry, read_contents(entry, origin)


def _parents(path: str) -> list[str]:
    """Return the folders above a path, each with a slash at its end."""
    return [path[: at + 1] for at, letter in enumerate(path) if letter == "/"]
