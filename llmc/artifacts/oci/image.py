"""The OCI manifest and config of a bundle or packed cache. layers.py and subjects.py describe the layers.

    image manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE,
                      "config": descriptor, "layers": [descriptor, …], "annotations": {name: text}}
    descriptor     = {"mediaType": str, "digest": digest, "size": bytes}
    config         = {"architecture": str, "os": "linux", "created": EPOCH, "config": {["Labels": {name: text}]},
                      "rootfs": {"type": "layers", "diff_ids": [digest of the uncompressed layer, …]}}

Both are canonical JSON without time or location, so that one bundle (and signature) is one image. It is a full image
rather than only an artifact, so that container engines unpack it: mounted, it is a bundle folder. Tools that copy
images may compress the layers and drop the artifactType; both forms are read. Formats: OCI image-spec 1.1, manifest.md,
config.md and layer.md.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from llmc.artifacts.digest import digest_bytes, is_digest
from llmc.artifacts.key import canonical_json
from llmc.artifacts.oci.layers import MAX_LAYERS
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
