"""A caller's request as members of a manifest, for comparison with an existing bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmc.compiler.targets import declared
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.buckets.plan import Plan

OPTIONS = ("quantize", "dtype", "specialise", "sample_top_k")
"""Compared options; options that targets declare are compared as well."""

LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_prompt_len")
APART = (
    "task",
    "plan",
    "verify",
    "require_native",
    "jobs",
    "executor",
    "address",
    "worker_memory",
    "cache_dir",
    "store",
    "report",
)
"""Arguments of `llmc.compile` that are not compared with a manifest, or do not concern planning."""

FACTS = {"architecture": "model_type", "layers": "num_hidden_layers", "vocab_size": "vocab_size"}
"""A manifest's fact about the model → the name in the checkpoint's config."""


def requested_members(
    manifest: Manifest, device: str | None, arguments: Mapping[str, Any], model: str | None
) -> dict[str, Any]:
    """The manifest members that `arguments` of `llmc.compile`, a device and a checkpoint determine.

    Arguments that choose buckets are planned within the bundle's limits. A checkpoint that cannot be read is not
    compared. Raises InputError for unusable arguments.
    """
    found: dict[str, Any] = {} if device is None else {"device": device}
    defaults = {"sample_top_k": 0, **{name: one.option.default for name, one in declared().items()}}
    options = {*OPTIONS, *defaults}
    found["options"] = {n: v for n, v in arguments.items() if n in options and v is not None}
    for name, default in defaults.items():  # a bundle compiled without such an option does not name it
        if found["options"].get(name) == default and name not in manifest.options:
            found["options"].pop(name, None)
    found["model"] = {} if model is None else _facts(model)
    found["plan"] = _plan(manifest, {n: v for n, v in arguments.items() if n not in options})
    return found


def _plan(manifest: Manifest, arguments: Mapping[str, Any]) -> dict[str, Any]:
    given: Plan | None = arguments.get("plan")
    if given is not None:
        return _buckets(given) | {"limits": given.limits.to_dict()}
    planning = {name: value for name, value in arguments.items() if value is not None and name not in APART}
    limits = {name: planning[name] for name in LIMITS if name in planning}
    if not planning.keys() - limits.keys():
        return {"limits": limits}
    from llmc.compiler.pipeline.planning import plan_for

    there = {name: value for name, value in manifest.plan.get("limits", {}).items() if name in LIMITS}
    return _buckets(plan_for(None, **{**there, **planning})) | {"limits": limits}


def _buckets(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in plan.to_dict().items() if name in ("prompt", "decode")}


def _facts(model: str) -> dict[str, Any]:
    from llmc.compiler.checkpoint import read_config

    try:
        config = read_config(model)
    except CheckpointError:
        return {}
    return {fact: config[name] for fact, name in FACTS.items() if name in config}
