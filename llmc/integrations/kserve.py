"""Kernel caches in OCI images, as KServe's model cache vault (mcv) labels and lays them out.

    config labels   cache.{vllm|triton|habana}.image/{entry-count, cache-size-bytes, summary[, format]}
                    io.kserve.km/{framework, cache-type, cache-root-env, cache-mount-subpath[, cache-hash]}
    files           io.vllm.cache/…, io.vllm.manifest/manifest.json; io.triton.cache/…; io.habana.cache/…

Read in mcv/docs/spec-compat.md, design.md and vllm-binary-cache.md of redhat-et/GKM (September 2026), and for Gaudi in
mcv/pkg/cache/habana.go. A label is written where one of these documents it and the tree says its value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from llmc.artifacts.third_party.base import ImageForm
from llmc.artifacts.third_party.tree import Tree

KSERVE = "io.kserve.km"
HOME = "/home/kserve/.cache"
"""Where KServe's containers keep caches: the folder in a label where a tree does not say its own."""

MAX_LABEL_BYTES = 4096
FACTORS = "cache_key_factors.json"
MODEL = "model"
ARTIFACT = "artifact_"
AOT = "torch_aot_compile"
RECIPE_MIB = 8192
_HASHES = ("code_hash", "compiler_hash", "config_hash")
_WARP_SIZES = {"cuda": 32, "rocm": 64}


def vllm_image(tree: Tree, facts: Mapping[str, str], entries: Collection[str]) -> ImageForm:
    """The image of vLLM's cache; `entries` are its hash folders."""
    hashes = ",".join(sorted({entry.rpartition("/")[2] for entry in entries}))
    ranks = _ranks(tree)
    save_formats = {rank["cache_save_format"] for rank in ranks}
    labels = {
        **_labels("vllm", tree, entries, _targets(facts)),
        "cache.vllm.image/format": "unpacked" if save_formats <= {"unpacked"} else "binary",
        f"{KSERVE}/framework": "vllm",
        f"{KSERVE}/cache-type": "torch-compile",
        f"{KSERVE}/cache-root-env": f"VLLM_CACHE_ROOT={facts.get('path', f'{HOME}/vllm')}",
        f"{KSERVE}/cache-mount-subpath": min(entries).partition("/")[0],
        f"{KSERVE}/cache-hash": hashes,
    }
    files = {"io.vllm.manifest/manifest.json": _manifest(ranks)} if ranks else {}
    return ImageForm("io.vllm.cache", _fitting(labels), files)


def triton_image(tree: Tree, facts: Mapping[str, str], entries: Collection[str]) -> ImageForm:
    """The image of Triton's cache; `entries` are the folders of its kernels."""
    return ImageForm("io.triton.cache", _fitting(_labels("triton", tree, entries, _targets(facts))), {})


def habana_image(tree: Tree, entries: Collection[str]) -> ImageForm:
    """The image of Gaudi's cache; `entries` are its recipes."""
    labels = {
        **_labels("habana", tree, entries, [{"backend": "hpu", "arch": "", "warp_size": 0}]),
        f"{KSERVE}/framework": "habana",
        f"{KSERVE}/cache-type": "habana-recipe",
        f"{KSERVE}/cache-root-env": f"PT_HPU_RECIPE_CACHE_CONFIG={HOME}/habana,false,{RECIPE_MIB}",
        f"{KSERVE}/cache-mount-subpath": ".",
    }
    return ImageForm("io.habana.cache", _fitting(labels), {})


def _labels(name: str, tree: Tree, entries: Collection[str], targets: list[dict[str, Any]]) -> dict[str, str]:
    prefix = f"cache.{name}.image"
    return {
        f"{prefix}/entry-count": str(len(entries)),
        f"{prefix}/cache-size-bytes": str(sum(file.size for file in tree.files.values())),
        f"{prefix}/summary": json.dumps({"targets": targets}, separators=(",", ":")),
    }


def _targets(facts: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the cache was compiled for: by Triton's metadata, else by the environment of vLLM."""
    backend = facts.get("target.backend")
    if backend is not None:
        size = facts.get("target.warp_size", "")
        return [{
            "backend": backend, "arch": facts.get("target.arch", ""), "warp_size": int(size) if size.isdigit() else 0,
        }]  # fmt: skip
    device = facts.get("env.VLLM_TARGET_DEVICE")
    if device is None:
        return []
    version = facts.get("env.VLLM_MAIN_CUDA_VERSION", "")
    arch = f"sm_{version}" if device == "cuda" and version else ""
    return [{"backend": device, "arch": arch, "warp_size": _WARP_SIZES.get(device, 0)}]


def _ranks(tree: Tree) -> list[dict[str, Any]]:
    """Every folder of a rank (and prefix) with compiled artifacts in it, as the manifest has them."""
    factors = [_factors(tree, path) for path in tree.files if path.rpartition("/")[2] == FACTORS]
    models = [path for path in tree.files if path.rpartition("/")[2] == MODEL and AOT in path.split("/")[:2]]
    return [*factors, *map(_model, models)]


def _model(path: str) -> dict[str, Any]:
    *_, name, rank, _ = path.split("/")
    return {
        "hash": name, "rank": rank, "prefix": "", "artifact_count": 1, "artifact_names": [MODEL],
        "cache_save_format": "mega-aot",
    }  # fmt: skip


def _factors(tree: Tree, path: str) -> dict[str, Any]:
    folder = path.rpartition("/")[0]
    _, name, rank, *prefix = folder.split("/")
    below = [other.removeprefix(folder + "/") for other in tree.files if other.startswith(f"{folder}/{ARTIFACT}")]
    factors = tree.json_object(path) or {}
    env = factors.get("env")
    environment = env if isinstance(env, dict) else {}
    return {
        "hash": name,
        "rank": rank,
        "prefix": "/".join(prefix),
        "artifact_count": len({item.partition("/")[0] for item in below}),
        "artifact_names": sorted({item.partition("/")[0] for item in below}),
        **{hashed: factors[hashed] for hashed in _HASHES if isinstance(factors.get(hashed), str)},
        "cache_save_format": "unpacked" if any("/" in item for item in below) else "binary",
        "target_device": str(environment.get("VLLM_TARGET_DEVICE", "")),
        "env": environment,
    }


def _manifest(ranks: list[dict[str, Any]]) -> bytes:
    found: dict[str, list[dict[str, Any]]] = {}
    for rank in ranks:
        found.setdefault(rank["hash"], []).append({name: value for name, value in rank.items() if name != "hash"})
    entries = [{"vllmHash": name, "cacheFormat": "binary", "binary": found[name]} for name in sorted(found)]
    return json.dumps({"vllm": entries}, indent=2, sort_keys=True).encode() + b"\n"


def _fitting(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that have a value, and not more than a label may have."""
    return {name: text for name, text in labels.items() if text and len(text.encode()) <= MAX_LABEL_BYTES}
