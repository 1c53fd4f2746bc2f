"""The OCI manifest, config and layers of a bundle or packed cache.

    image manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE,
                      "config": descriptor, "layers": [descriptor, …], "annotations": {name: text}}
    descriptor     = {"mediaType": str, "digest": digest, "size": bytes}
    config         = {"architecture": str, "os": "linux", "created": EPOCH, "config": {["Labels": {name: text}]},
                      "rootfs": {"type": "layers", "diff_ids": [digest of the uncompressed layer, …]}}

Both are canonical JSON without time or location, so that one bundle (and signature) is one image. It is a full image
rather than only an artifact, so that container engines unpack it: mounted, it is a bundle folder. Tools that copy
images may compress the layers and drop the artifactType; both forms are read. Formats: OCI image-spec 1.1, manifest.md,
config.md and layer.md.

    bundle = own* group* facts
    own    = one blob of at least OWN_FROM · 2^k bytes, with the least k for which there are at most MAX_OWN of them;
             the largest first, so that bundles with the same weights begin with the same layers: container engines
             store a chain of layers once
    group  = the smaller blobs whose digests begin with the same hex digit, by digest: one more or less changes one
             of 16 layers
    facts  = manifest.json, [signature.json]

Only the blobs decide which share a layer, so bundles that share blobs share layers. Every layer except the facts also
has the folders blobs/ and blobs/sha256/. There are at most 127 layers, the limit of container engines. Readers follow
these rules too, so changing them requires a new ARTIFACT_TYPE.

    cache  = facts tree
    facts  = the entry, signature included
    tree   = a gzip file of the tree as it is: mounted, its folder is what the server reads. Tools that know KServe's
             caches take the last layer

The facts layer describes the other layers byte for byte and is small: it is read, and its signature checked, first.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from llmc.artifacts.bundle.manifest import FILE_NAME, SIGNATURE_NAME, Manifest
from llmc.artifacts.bundle.stored import KIND, read_bundle
from llmc.artifacts.digest import PREFIX, Blob, digest_bytes, is_digest, parse
from llmc.artifacts.key import canonical_json
from llmc.artifacts.oci import tar
from llmc.artifacts.remotes.transfer import Signs
from llmc.artifacts.store.entries import MAX_BYTES, Entry, decode_entry, encode_entry, entry_body
from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.contents import KIND as CACHE
from llmc.artifacts.third_party.contents import Contents, read_contents
from llmc.errors import ArtifactError

ARTIFACT_TYPE = "application/vnd.llmc.bundle.v1"
CACHE_TYPE = "application/vnd.llmc.foreign-cache.v1"
TYPE_LABEL = "dev.llmc.type"
"""Config label with an image's type, used if a tool dropped the artifactType; a bundle has none."""

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
GZIP_TYPE = f"{LAYER_TYPE}+gzip"
EPOCH = "1970-01-01T00:00:00Z"
MAX_MANIFEST_BYTES = 4 << 20
MAX_CONFIG_BYTES = 4 << 20
MAX_LAYER_BYTES = 1 << 51
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64", "amd64": "amd64"}


class Descriptor(NamedTuple):
    """The OCI descriptor of a blob; `size` in bytes."""

    media_type: str
    digest: str
    size: int

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as a JSON object."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


class Image(NamedTuple):
    """A parsed image manifest; nothing that it names has been read. `kind` is its artifactType, if any."""

    digest: str
    kind: str | None
    config: Descriptor
    layers: tuple[Descriptor, ...]


def describe(media_type: str, content: bytes) -> Descriptor:
    """Return the descriptor of a content."""
    return Descriptor(media_type, digest_bytes(content), len(content))


def architecture(names: Iterable[str]) -> str:
    """Return the architecture, in Go's naming, of the instruction sets in `names`, or else of this host."""
    known = [_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES]
    machine = platform.machine().lower()
    return known[0] if known else _ARCHITECTURES.get(machine, machine)


def write_config(architecture_: str, labels: Mapping[str, str], diff_ids: Sequence[str]) -> bytes:
    """Return the config of an image."""
    config = {
        "architecture": architecture_,
        "os": "linux",
        "created": EPOCH,
        "config": {"Labels": dict(labels)} if labels else {},
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
    }
    return canonical_json(config)


def write_image(
    kind: str, annotations: Mapping[str, str], config: Descriptor, layers: Sequence[Descriptor]
) -> bytes:  # fmt: skip
    """Return an image manifest; empty annotations are left out."""
    image = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": kind,
        "config": config.to_json(),
        "layers": [layer.to_json() for layer in layers],
        "annotations": {name: text for name, text in annotations.items() if text},
    }
    return canonical_json(image)


def read_image(data: bytes, origin: str) -> Image:
    """Parse an image manifest. Raises ArtifactError, and nothing else, unless it may be one of llmc's."""
    document = parse_object(data, MAX_MANIFEST_BYTES, origin)
    kind = document.get("mediaType", MANIFEST_TYPE)
    if kind != MANIFEST_TYPE or document.get("schemaVersion") != 2:
        _fail(origin, f"its media type is {kind!r:.120}, not {MANIFEST_TYPE}")
    artifact = document.get("artifactType")
    if artifact not in (None, ARTIFACT_TYPE, CACHE_TYPE):
        _fail(origin, f"its artifactType is {artifact!r:.120}, not {ARTIFACT_TYPE}")
    layers = document.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= MAX_LAYERS:
        _fail(origin, f"it has to have 1 to {MAX_LAYERS} layers")
    return Image(
        digest_bytes(data),
        artifact,
        read_descriptor(document.get("config"), (CONFIG_TYPE,), MAX_CONFIG_BYTES, origin),
        tuple(read_descriptor(layer, (LAYER_TYPE, GZIP_TYPE), MAX_LAYER_BYTES, origin) for layer in layers),
    )


def read_descriptor(item: object, media_types: Sequence[str], limit: int, origin: str) -> Descriptor:
    """Parse a descriptor of one of these media types and at most `limit` bytes. Raises ArtifactError."""
    if not isinstance(item, Mapping):
        _fail(origin, "a descriptor is not an object")
    kind, digest, size = item.get("mediaType"), item.get("digest"), item.get("size")
    if kind not in media_types:
        _fail(origin, f"something in it is of media type {kind!r:.120}, not {' or '.join(media_types)}")
    if not is_digest(digest) or type(size) is not int or not 0 <= size <= limit:
        _fail(origin, f"digest {digest!r:.120} with size {size!r:.40} is not a descriptor of {limit} bytes at most")
    return Descriptor(str(kind), str(digest), size)


def read_diff_ids(data: bytes, count: int, origin: str) -> list[str]:
    """Return the digests of the uncompressed layers, exactly `count`. Raises ArtifactError."""
    rootfs = parse_object(data, MAX_CONFIG_BYTES, origin).get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or len(diff_ids) != count or not all(map(is_digest, diff_ids)):
        _fail(origin, f"its config does not name {count} layers")
    return diff_ids


def read_kind(image: Image, config: bytes, origin: str) -> str:
    """Return an image's artifactType, or the type in its config's label. Raises ArtifactError."""
    if image.kind is not None:
        return image.kind
    container = parse_object(config, MAX_CONFIG_BYTES, origin).get("config")
    labels = container.get("Labels") if isinstance(container, dict) else None
    return CACHE_TYPE if isinstance(labels, dict) and labels.get(TYPE_LABEL) == CACHE_TYPE else ARTIFACT_TYPE


def parse_object(data: bytes, limit: int, origin: str) -> dict[str, Any]:
    """Parse a JSON object of at most `limit` bytes. Raises ArtifactError."""
    if len(data) > limit:
        _fail(origin, f"a document of more than {limit} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{origin}: not valid JSON ({error}); push the bundle again") from error
    if not isinstance(document, dict):
        _fail(origin, "not a JSON object")
    return document


def _fail(origin: str, problem: str) -> NoReturn:
    raise ArtifactError(f"{origin}: not a bundle of llmc ({problem}); push one with `llmc cache push`")


OWN_FROM = 1 << 20
MAX_OWN = 110
MAX_LAYERS = MAX_OWN + 16 + 1
FOLDERS = ("blobs/", "blobs/sha256/")
FACTS = (FILE_NAME, SIGNATURE_NAME)


class Layer(NamedTuple):
    """Folders, and files with their blobs, in archive order; a `zipped` layer is a gzip file (tar.py)."""

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


ENTRY = "llmc-entry.json"
CACHE_FOLDER_MODE, FILE_MODE, EXECUTABLE_MODE = 0o755, 0o644, 0o755


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
    return Layer(tuple(sorted(folders)), members, CACHE_FOLDER_MODE, zipped=True)


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
    return [path[: at + 1] for at, letter in enumerate(path) if letter == "/"]
