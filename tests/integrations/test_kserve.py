"""Images of caches: the labels and files that redhat-et/GKM's mcv/docs (September 2026) give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.integrations.kserve import targets
from tests.artifacts.third_party.helpers import AOT_HASH, HASH, MAKERS, make_gaudi, make_vllm, packed, write


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_labels_of_vllms(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "vllm", make_vllm(tmp_path / "cache"))
    assert contents.image_folder == "io.vllm.cache"
    labels = dict(contents.image_labels)
    assert json.loads(labels.pop("cache.vllm.image/summary")) == {
        "targets": [{"backend": "cuda", "arch": "sm_12.9", "warp_size": 32}]
    }
    assert labels == {
        "cache.vllm.image/entry-count": "2",
        "cache.vllm.image/cache-size-bytes": str(contents.size),
        "cache.vllm.image/format": "binary",
        "io.kserve.km/framework": "vllm",
        "io.kserve.km/cache-type": "torch-compile",
        "io.kserve.km/cache-hash": f"{HASH},{AOT_HASH}",
        "io.kserve.km/cache-mount-subpath": "torch_compile_cache",
        "io.kserve.km/cache-root-env": "VLLM_CACHE_ROOT=/home/kserve/.cache/vllm",
    }


def test_the_manifest_of_vllms(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "vllm", make_vllm(tmp_path / "cache"))
    (path,) = contents.image_files
    assert path == "io.vllm.manifest/manifest.json"
    found = json.loads(store.get_bytes(contents.image_files[path].digest))["vllm"]
    assert [entry["vllmHash"] for entry in found] == [HASH, AOT_HASH]
    first, second = found[0]["binary"]
    assert first == {
        "rank": "rank_0_0", "prefix": "backbone", "artifact_count": 1,
        "artifact_names": ["artifact_compile_range_1_8_subgraph_0"], "code_hash": "f00d", "config_hash": "c0ffee",
        "compiler_hash": "beef", "cache_save_format": "binary", "target_device": "cuda",
        "env": {"VLLM_MAIN_CUDA_VERSION": "12.9", "VLLM_TARGET_DEVICE": "cuda"},
    }  # fmt: skip
    assert second["rank"] == "rank_1_0"
    assert found[1]["binary"][0]["artifact_names"] == ["model"]


def test_unpacked_artifacts_are_said_to_be(store: Store, tmp_path: Path) -> None:
    root = write(
        make_vllm(tmp_path / "cache") / "torch_compile_cache" / "f" / "rank_0_0" / "b" / "artifact_1" / "k.py", ""
    )
    write(root.parents[1] / "cache_key_factors.json", "{}")
    contents = packed(store, "vllm", tmp_path / "cache")
    (blob,) = contents.image_files.values()
    formats = [item["binary"][0]["cache_save_format"] for item in json.loads(store.get_bytes(blob.digest))["vllm"]]
    assert formats == ["binary", "mega-aot", "unpacked"] or sorted(formats) == ["binary", "mega-aot", "unpacked"]


def test_tritons_own_target_is_what_counts() -> None:
    facts = {
        "target.backend": "hip",
        "target.arch": "gfx90a",
        "target.warp_size": "64",
        "env.VLLM_TARGET_DEVICE": "rocm",
    }
    assert targets(facts) == [{"backend": "hip", "arch": "gfx90a", "warp_size": 64}]
    assert targets({}) == []


def test_labels_of_gaudis(store: Store, tmp_path: Path) -> None:
    contents = packed(store, "gaudi", make_gaudi(tmp_path / "cache"))
    assert contents.image_folder == "io.habana.cache"
    assert contents.image_labels["io.kserve.km/cache-type"] == "habana-recipe"
    assert contents.image_labels["cache.habana.image/entry-count"] == "1"
    expected = "PT_HPU_RECIPE_CACHE_CONFIG=/home/kserve/.cache/habana,false,8192"
    assert contents.image_labels["io.kserve.km/cache-root-env"] == expected


@pytest.mark.parametrize("name", ["jax", "vllm-neuron"])
def test_where_nothing_is_documented_there_are_no_labels(store: Store, tmp_path: Path, name: str) -> None:
    contents = packed(store, name, MAKERS[name](tmp_path / "cache"))
    assert contents.image_folder == f"io.{name}.cache" and not contents.image_labels and not contents.image_files


def test_a_label_that_is_too_long_is_left_out(store: Store, tmp_path: Path) -> None:
    root = make_vllm(tmp_path / "cache")
    for number in range(500):
        write(root / "torch_compile_cache" / f"{number:010}" / "rank_0_0" / "x", "x")
    labels = packed(store, "vllm", root).image_labels
    assert "io.kserve.km/cache-hash" not in labels and labels["cache.vllm.image/entry-count"] == "502"
