"""Provenance of a bundle: its sources and versions, in the fields of SLSA provenance v1.

    provenance = {"model": str, "checkpoint": digest, "plan": digest of the plan, 64 hex,
                  "buildDefinition": {"buildType": BUILD_TYPE, "externalParameters": {…}, "internalParameters": {…},
                                      "resolvedDependencies": [dependency, …]},
                  "runDetails": {"builder": {"id": BUILDER, "version": {name: version}}}}
    dependency = {"name": "checkpoint/" file, "digest": {"sha256": 64 hex}}
               | {"name": package, "uri": purl[, "digest": …],
                  "annotations": {"version": str[, "licenseExpression" (SPDX) | "licenseName" (words): str]}}

Source: https://slsa.dev/spec/v1.0/provenance. Repeated compiles give the same bytes on any machine: no time, host, user
or path is included. A model given as a path is therefore named by its last part only. The store records its full
location, under a key that never leaves the machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.digest import parse
from llmc.artifacts.key import LOCAL, Key
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.checkpoint import map_paths
from llmc.compiler.code import package_digest
from llmc.errors import CapacityError
from llmc.paths import exists, expanded
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.engine.sampling.params import recommended
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Recorded

BUILD_TYPE = "urn:llmc:compile:v1"
BUILDER = "urn:llmc:builder:local"
PACKAGES = (
    "gguf", "huggingface-hub", "ml-dtypes", "numpy", "onnx", "onnxruntime", "safetensors", "sympy", "tokenizers",
    "torch", "transformers", "ziglang",
)  # fmt: skip
"""Packages that can affect a bundle; all installed ones are listed, whether this target uses them or not."""

LICENCE = "Apache-2.0"
LONGEST_LICENCE = 100


def provenance(
    stages: Stages, target: str, recorded: Recorded, toolchain: Mapping[str, str], options: CompileOptions, model: str
) -> dict[str, Any]:  # fmt: skip
    """Provenance of a bundle that the named target compiles from `model`, as the user named it."""
    name, plan = model_name(model), stages.plan.digest()
    packages = [found for package in PACKAGES if (found := _package(package))]
    versions = {item["name"]: item["annotations"]["version"] for item in packages}
    files = [
        {"name": f"checkpoint/{role}", "digest": {"sha256": parse(digest)}}
        for role, digest in stages.checkpoint_files().items()
    ]
    return {
        "model": name,
        "checkpoint": stages.checkpoint_digest(),
        "plan": plan,
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "model": name, "device": options.device, "quantize": options.quantize, "dtype": options.dtype,
                "specialise": options.specialise, **options.extensions, "plan": plan,
            },
            "internalParameters": {
                "target": target, "executor": recorded.executor, "toolchain": toolchain,
                "isa": list(recorded.features),
            },
            "resolvedDependencies": [*files, _llmc(), *packages],
        },
        "runDetails": {
            "builder": {
                "id": BUILDER,
                "version": {"llmc": __version__, "python": platform.python_version(), **versions},
            },
        },
    }  # fmt: skip


def model_name(model: str) -> str:
    """Name of a model for manifests: the last part of an existing path, or any other name unchanged, followed by those
    of adapters."""

    def name(part: str) -> str:
        path = expanded(part)
        return Path(os.path.abspath(path)).name if exists(path) else part  # noqa: PTH100 - a link's own name

    return map_paths(model, name)


def remember_model(store: Store, checkpoint: str, model: str) -> None:
    """Record a checkpoint's location on this machine for `find_model`; does nothing without room."""

    def location(part: str) -> str:
        path = expanded(part)
        return os.path.abspath(path) if exists(path) else part  # noqa: PTH100

    where = map_paths(model, location)
    with suppress(CapacityError, UnwritableError):
        store.publish(_model_key(checkpoint), {}, {"model": where})


def find_model(store: Store, checkpoint: str, name: str) -> str:
    """Location of a checkpoint when it was last compiled on this machine, or `name` if unknown."""
    entry = store.lookup(_model_key(checkpoint))
    return name if entry is None else str(entry.meta.get("model", name))


def _model_key(checkpoint: str) -> Key:
    return Key(f"{LOCAL}model", {"checkpoint": checkpoint})


def _llmc() -> dict[str, Any]:
    found = _dependency("llmc", __version__) | {"digest": {"sha256": parse(package_digest())}}
    found["annotations"]["licenseExpression"] = LICENCE
    return found


@cache
def _package(name: str) -> dict[str, Any] | None:
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    built = _dependency(name, found["Version"])
    expression = _first(found, "License-Expression")
    text = _first(found, "License")
    classifiers = [line.split(" :: ")[-1] for line in found.get_all("Classifier", []) if line.startswith("License ::")]
    if expression:
        built["annotations"]["licenseExpression"] = expression
    elif text and "\n" not in text and len(text) <= LONGEST_LICENCE:
        built["annotations"]["licenseName"] = text
    elif classifiers:
        built["annotations"]["licenseName"] = ", ".join(classifiers)
    return built


def _first(found: metadata.PackageMetadata, name: str) -> str:
    return str(next(iter(found.get_all(name, [])), "")).strip()


def _dependency(name: str, version: str) -> dict[str, Any]:
    return {
        "name": name,
        "uri": f"pkg:pypi/{quote(name.lower().replace('_', '-'), safe='')}@{quote(version, safe='')}",
        "annotations": {"version": version},
    }


def model_facts(checkpoint: Checkpoint, cache: CacheShape | None = None) -> dict[str, Any]:
    """Facts about the model for a manifest; `cache` is its cache shape, by default the architecture's."""
    config, generation = checkpoint.config, checkpoint.generation_config()
    sampling = recommended(generation)
    return {
        "name": checkpoint.name,
        "architecture": config["model_type"],
        **_cache_facts(cache_of(config) if cache is None else cache),
        "vocab_size": config["vocab_size"],
        "eos_token_ids": generation.get("eos_token_ids", []),
        "special_tokens": checkpoint.special_tokens(),
        **({"sampling": sampling} if sampling else {}),
        **({"adapters": [asdict(adapter) for adapter in checkpoint.choices]} if checkpoint.choices else {}),
    }


def without_rings(model: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the device's ring buffers from a manifest's model facts."""
    facts = dict(model)
    tensors = facts.get("cache")
    if tensors is not None:
        facts |= {"cache": None, **_cache_facts(CacheShape.from_json(facts["layers"], tensors).without_rings)}
    return facts


def _cache_facts(cache: CacheShape) -> dict[str, Any]:
    """Facts that `Bundle.cache_shape` reads: three numbers where every layer has a key and a value of one size."""
    uniform = cache.uniform
    if uniform is None:
        return {"layers": cache.layers, "cache": cache.to_json()}
    return {"layers": uniform.layers, "kv_heads": uniform.kv_heads, "head_dim": uniform.head_dim}
