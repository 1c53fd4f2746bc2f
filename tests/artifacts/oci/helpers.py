"""What the tests of images share: small bundles, those who trust, images made by hand, and places to pull from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import checkout, publish_bundle
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.digest import PREFIX, digest_bytes
from llmc.artifacts.oci import image, pull_bundle
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import manifest as any_manifest

WEIGHTS = bytes(range(256)) * 4096 + b"weights"
"""A little more than what gets a layer of its own."""
OTHERS = {"tokenizer": b'{"model": {}}', "prefill": b"graph of prefill" * 20, "decode": b"graph of decode" * 20}


def make_bundle(store: Store, *, signature: bytes | None = None, state: str = "portable", **contents: bytes) -> Entry:
    """A bundle in a store: the weights and others above, or with other contents."""
    contents = {"weights": WEIGHTS, **OTHERS, **contents}
    digests = {name: store.put_bytes(data).digest for name, data in contents.items()}
    executables = [
        {
            "phase": name, "batch": 4, "query": None, "context": 2048, "state": state, "blob": digests[name],
            "buckets": 6, "key": digest_bytes(name.encode()),
        }
        for name in ("prefill", "decode")
    ]  # fmt: skip
    built = any_manifest(
        executables=executables,
        files={f"{name}.bin": digest for name, digest in digests.items()},
        blobs={digests[name]: len(data) for name, data in contents.items()},
        isa=["x86_64", "avx2"],
    )
    return publish_bundle(store, built, signature)


class Anyone:
    """Trusts everything, and keeps what it was asked about."""

    def __init__(self) -> None:
        self.requested: list[tuple[bytes, bytes | None, bool, str]] = []

    def require(self, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> str | None:
        self.requested.append((content, signature, native, origin))
        return None


class Nobody:
    """Trusts nothing."""

    def require(self, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> str | None:
        raise UntrustedError(f"{origin}: not signed")


class Seal:
    """Signs in a way that a test can see."""

    def sign(self, content: bytes, existing: bytes | None = None) -> bytes:
        return json.dumps({"seal": digest_bytes(content), "before": (existing or b"").decode()}).encode()


def pulled(tmp_path: Path, reference: str, name: str = "pulled") -> Path:
    """Pull into a new store and check the bundle out, whole."""
    store = Store(tmp_path / name)
    entry, _ = pull_bundle(store, reference, trust=Anyone())
    folder = checkout(store, entry)
    assert BundleFiles.open(folder).verify() == []
    return folder


def blob_file(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / digest.removeprefix(PREFIX)


def put(folder: Path, media_type: str, data: bytes) -> dict[str, Any]:
    """Put a blob into a layout by hand; its descriptor."""
    path = blob_file(folder, digest_bytes(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return image.describe(media_type, data).to_json()


def read_layout(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The image manifest and the config of the only image of a layout."""
    index = json.loads((folder / "index.json").read_bytes())
    found = json.loads(blob_file(folder, index["manifests"][0]["digest"]).read_bytes())
    return found, json.loads(blob_file(folder, found["config"]["digest"]).read_bytes())


def forge(
    folder: Path, archives: Sequence[bytes], *, media_type: str = image.LAYER_TYPE, files: Sequence[bytes] = (),
    reported: Mapping[str, Any] | None = None, **changes: Any,
) -> str:  # fmt: skip
    """The reference of an image. `files` are served as layers, `reported` is its config, `changes` are false."""
    served = list(files) or list(archives)
    stated = [put(folder, media_type, data) for data in served]
    diff_ids = [digest_bytes(data) for data in archives]
    rootfs = {"rootfs": {"type": "layers", "diff_ids": diff_ids}} if reported is None else reported
    built = put(folder, image.CONFIG_TYPE, json.dumps(rootfs).encode())
    document = {
        "schemaVersion": 2, "mediaType": image.MANIFEST_TYPE, "artifactType": image.ARTIFACT_TYPE, "config": built,
        "layers": stated, **changes,
    }  # fmt: skip
    entry = put(folder, image.MANIFEST_TYPE, json.dumps(document).encode())
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    return f"oci-layout:{folder}"


def true_archives(store: Store, entry: Entry) -> list[bytes]:
    """The layers of a bundle's image, as they should be."""
    facts = store.get_bytes(entry.outputs["manifest.json"].digest)
    blobs = {name: blob.size for name, blob in entry.outputs.items() if name.startswith(PREFIX)}
    built = [b"".join(layer.write(lambda blob: [store.get_bytes(blob.digest)])) for layer in image.split(blobs)]
    return [*built, image.write_facts(facts, None)]


KILLED = """
    import os, signal, sys
    from llmc.artifacts.oci import pull_bundle, push_image
    from llmc.artifacts.store.store import Store
    from tests.artifacts.oci.helpers import Anyone

    def die(done, total):
        if done > int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)

    store = Store(sys.argv[2])
    if sys.argv[1] == "push":
        push_image(store, store.find(sys.argv[5]), sys.argv[3], progress=die, jobs=1)
    else:
        pull_bundle(store, sys.argv[3], trust=Anyone(), progress=die, jobs=1)
"""
"""A program that pushes or pulls, and dies once so many bytes were moved."""
