"""Kernel caches in OCI images, with the labels and layout of KServe's model cache vault (mcv).

    config labels   cache.{vllm|triton|habana}.image/{entry-count, cache-size-bytes, summary[, format]}
                    io.kserve.km/{framework, cache-type, cache-root-env, cache-mount-subpath[, cache-hash]}
    files           io.vllm.cache/…, io.vllm.manifest/manifest.json; io.triton.cache/…; io.habana.cache/…

Read in mcv/docs/spec-compat.md, design.md and vllm-binary-cache.md of redhat-et/GKM (September 2026), and for Gaudi in
mcv/pkg/cache/habana.go. A label is written where one of these documents defines it and the tree has its value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from llmc.artifacts.third_party.base import ImageForm
from llmc.artifacts.third_party.contents import Tree

HOME = "/home/kserve/.cache"
"""KServe's cache folder in containers, used in a label where a tree does not record its own."""

MAX_LABEL_BYTES = 4096
_WARP_SIZES = {"cuda": 32, "rocm": 64}


def image(
    name: str, tree: Tree, entries: Collection[str], targets: list[dict[str, Any]], *,
    form: str = "", files: Mapping[str, bytes] | None = None, **kserve: str,
) -> ImageForm:  # fmt: skip
    """Return the image of the cache `name` with these `entries`, compiled for `targets`.

    `form` is the label "format", and `kserve` are labels of io.kserve.km with underscores. Labels without a value, or
    too long for one, are left out.
    """
    labels = {
        "entry-count": str(len(entries)),
        "cache-size-bytes": str(sum(file.size for file in tree.files.values())),
        "summary": json.dumps({"targets": targets}, separators=(",", ":")),
        "format": form,
    }
    every = {f"cache.{name}.image/{label}": text for label, text in labels.items()}
    every |= {f"io.kserve.km/{label.replace('_', '-')}": text for label, text in kserve.items()}
    fitting = {label: text for label, text in every.items() if text and len(text.encode()) <= MAX_LABEL_BYTES}
    return ImageForm(f"io.{name}.cache", fitting, files or {})


def targets(facts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a cache's compile targets, from Triton's metadata, or otherwise from vLLM's environment."""
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
