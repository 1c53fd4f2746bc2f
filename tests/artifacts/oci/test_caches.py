"""Packed caches of other servers as images: what tools find in them, and what comes back."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.oci import pull_bundle, pull_image, push_image
from llmc.artifacts.oci.image import CACHE_TYPE
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.packing import pack, unpack
from llmc.errors import ArtifactError
from llmc.integrations import compile_cache
from tests.artifacts.oci.helpers import Anyone, Nobody, Seal, blob_file, put, read_layout
from tests.artifacts.third_party.helpers import HASH, MAKERS, content, make_neuron, make_vllm, write


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return tmp_path / "images"


def packed(store: Store, name: str, folder: Path) -> Entry:
    return pack(store, compile_cache(name), folder, facts={"path": ""}).entry


def payload(layout: Path) -> bytes:
    manifest, _ = read_layout(layout)
    return blob_file(layout, manifest["layers"][-1]["digest"]).read_bytes()


@pytest.mark.parametrize("name", MAKERS)
def test_it_comes_back_byte_for_byte(store: Store, tmp_path: Path, layout: Path, name: str) -> None:
    source = MAKERS[name](tmp_path / "source")
    (source / "a folder").mkdir()
    if name == "vllm-neuron":
        (source / "a folder").rmdir()
        write(source / ("de" * 16) / "run", "x").chmod(0o755)
    done = pack(store, compile_cache(name), source)
    report = push_image(store, done.entry, f"oci-layout:{layout}:v1")
    assert report.entries == 1 and push_image(store, done.entry, f"oci-layout:{layout}:v1").blobs == 0
    other = Store(tmp_path / "other")
    entry, _ = pull_image(other, f"oci-layout:{layout}:v1", trust=Anyone())
    assert entry.key == done.entry.key and other.lookup(entry.key, verify=True) is not None
    unpack(other, compile_cache(name), done.contents, tmp_path / "place")
    expected = {path: value for path, value in content(source).items() if path in done.contents.files}
    assert content(tmp_path / "place") == expected


@pytest.mark.full
def test_a_registry_takes_it(store: Store, tmp_path: Path, registry_port: int) -> None:
    entry = packed(store, "gaudi", MAKERS["gaudi"](tmp_path / "c"))
    name = f"oci://127.0.0.1:{registry_port}/caches/gaudi:v1"
    assert push_image(store, entry, name).entries == 1
    assert push_image(store, entry, name).blobs == 0
    assert pull_image(Store(tmp_path / "other"), name, trust=Anyone())[0].key == entry.key


def test_tools_find_the_tree_the_manifest_and_the_labels(store: Store, tmp_path: Path, layout: Path) -> None:
    source = make_vllm(tmp_path / "source")
    push_image(store, packed(store, "vllm", source), f"oci-layout:{layout}:v1")
    manifest, config = read_layout(layout)
    assert manifest["artifactType"] == CACHE_TYPE and len(manifest["layers"]) == 2
    assert manifest["layers"][-1]["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
    labels = config["config"]["Labels"]
    assert labels["io.kserve.km/cache-type"] == "torch-compile" and labels["cache.vllm.image/entry-count"] == "2"
    unzipped = gzip.decompress(payload(layout))
    assert digest_bytes(unzipped) == config["rootfs"]["diff_ids"][-1]
    with tarfile.open(fileobj=io.BytesIO(unzipped)) as opened:
        members = {member.name: member for member in opened.getmembers()}
        path = f"io.vllm.cache/torch_compile_cache/{HASH}/rank_0_0/backbone/cache_key_factors.json"
        stream = opened.extractfile(path)
        assert stream is not None and json.load(stream)["config_hash"] == "c0ffee"
    assert members["io.vllm.cache"].isdir() and members["io.vllm.cache"].mode == 0o755
    assert members[path].mode == 0o644 and "io.vllm.manifest/manifest.json" in members


def test_the_image_depends_on_the_cache_alone(store: Store, tmp_path: Path, layout: Path) -> None:
    push_image(store, packed(store, "jax", MAKERS["jax"](tmp_path / "one")), f"oci-layout:{layout}:v1")
    other = Store(tmp_path / "other")
    push_image(other, packed(other, "jax", MAKERS["jax"](tmp_path / "two")), f"oci-layout:{tmp_path / 'more'}:v1")
    assert read_layout(layout) == read_layout(tmp_path / "more")


def test_long_names_and_letters_of_the_world(store: Store, tmp_path: Path, layout: Path) -> None:
    source = make_neuron(tmp_path / "source")
    write(source / ("de" * 16) / ("ü" * 90) / ("x" * 200), "x")
    push_image(store, packed(store, "vllm-neuron", source), f"oci-layout:{layout}:v1")
    entry, _ = pull_image(Store(tmp_path / "other"), f"oci-layout:{layout}:v1", trust=Anyone())
    assert any(name.endswith("x" * 200) for name in entry.outputs)


def test_nothing_but_its_facts_is_fetched_for_one_who_trusts_nobody(store: Store, tmp_path: Path, layout: Path) -> None:
    push_image(store, packed(store, "jax", MAKERS["jax"](tmp_path / "c")), f"oci-layout:{layout}:v1")
    manifest, _ = read_layout(layout)
    blob_file(layout, manifest["layers"][-1]["digest"]).unlink()
    other = Store(tmp_path / "other")
    with pytest.raises(UntrustedError):
        pull_image(other, f"oci-layout:{layout}:v1", trust=Nobody())
    assert other.entries() == [] and other.usage().blobs == 0


def test_its_signature_goes_along(store: Store, tmp_path: Path, layout: Path) -> None:
    entry = packed(store, "jax", MAKERS["jax"](tmp_path / "c"))
    push_image(store, entry, f"oci-layout:{layout}:v1", signer=Seal())
    found, _ = pull_image(Store(tmp_path / "other"), f"oci-layout:{layout}:v1", trust=Anyone())
    assert found.signature is not None and found.signature["seal"]
    assert store.find(entry.key.hex).signature is None


def test_it_is_known_without_its_artifact_type(store: Store, tmp_path: Path, layout: Path) -> None:
    entry = packed(store, "jax", MAKERS["jax"](tmp_path / "c"))
    push_image(store, entry, f"oci-layout:{layout}:v1")
    assert pull_image(Store(tmp_path / "other"), _forged(layout, artifactType=None), trust=Anyone())[0].key == entry.key


def test_where_a_bundle_is_requested_it_is_refused(store: Store, tmp_path: Path, layout: Path) -> None:
    push_image(store, packed(store, "jax", MAKERS["jax"](tmp_path / "c")), f"oci-layout:{layout}:v1")
    with pytest.raises(ArtifactError, match="a packed cache of another server, not a bundle; use `llmc cache unpack`"):
        pull_bundle(Store(tmp_path / "other"), f"oci-layout:{layout}:v1", trust=Anyone())


@pytest.mark.parametrize("lie", ["other content", "a layer more", "bundle", "no entry", "an entry that is none"])
def test_an_image_that_is_not_what_its_entry_says_is_refused(
    store: Store, tmp_path: Path, layout: Path, lie: str
) -> None:
    push_image(store, packed(store, "jax", MAKERS["jax"](tmp_path / "c")), f"oci-layout:{layout}:v1")
    manifest, config = read_layout(layout)
    first, last = manifest["layers"]
    changes: dict[str, Any] = {}
    if lie == "other content":
        data = gzip.decompress(payload(layout)).replace(b"executable", b"EXECUTABLE")
        changes = _layers(layout, config, [first, _put(layout, data)], {1: data})
    elif lie == "a layer more":
        changes = _layers(layout, config, [first, last, last], {})
    elif lie == "bundle":
        changes = {"artifactType": "application/vnd.llmc.bundle.v1"}
    else:
        name, text = ("other.json", b"{}") if lie == "no entry" else ("llmc-entry.json", b"{}")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as built:
            info = tarfile.TarInfo(name)
            info.size = len(text)
            built.addfile(info, io.BytesIO(text))
        changes = _layers(layout, config, [_put(layout, buffer.getvalue(), zipped=False), last], {0: buffer.getvalue()})
    other = Store(tmp_path / "other")
    with pytest.raises(ArtifactError):
        pull_image(other, _forged(layout, **changes), trust=Anyone())
    assert other.entries() == []


def _put(layout: Path, data: bytes, *, zipped: bool = True) -> dict[str, Any]:
    kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if zipped else "")
    return put(layout, kind, gzip.compress(data) if zipped else data)


def _layers(
    layout: Path, config: dict[str, Any], layers: list[dict[str, Any]], changed: dict[int, bytes]
) -> dict[str, Any]:
    ids = [*config["rootfs"]["diff_ids"], *config["rootfs"]["diff_ids"][-1:]][: len(layers)]
    for at, data in changed.items():
        ids[at] = digest_bytes(data)
    reported = {**config, "rootfs": {"type": "layers", "diff_ids": ids}}
    built = put(layout, "application/vnd.oci.image.config.v1+json", json.dumps(reported).encode())
    return {"layers": layers, "config": built}


def _forged(layout: Path, **changes: Any) -> str:
    """The layout's image with other members; None takes one away."""
    manifest, _ = read_layout(layout)
    reported = {name: value for name, value in {**manifest, **changes}.items() if value is not None}
    entry = put(layout, manifest["mediaType"], json.dumps(reported).encode())
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    return f"oci-layout:{layout}"
