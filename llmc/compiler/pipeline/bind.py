"""Bind weights to a bundle that was compiled from a configuration alone.

Such a bundle has tensors.json, tables.npz and config.json (weights/stage.py) in place of weights. Binding compares them
with a checkpoint, by architecture, names and shapes, creates the weights file in the store, and writes a normal bundle:

    files       the old ones, and "weights", "weights.json"; tokenizer and chat template where there were none
    model       the name of the checkpoint, and its end and special tokens where there were none
    provenance  "model", "checkpoint" and the dependencies "checkpoint/…" are those of the weights; dependencies of the
                configuration are "configuration/…"; "bound" = {"manifest": digest, "model", "checkpoint"} of the bundle
                that was bound

Everything else, including executables and their keys, stays as compiled.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import remember_bundle
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import digest_bytes, parse
from llmc.artifacts.key import canonical_json
from llmc.buckets.plan import Plan
from llmc.compiler.architectures.shared.names import LM_HEADS
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import Checkpoint, stored_name
from llmc.compiler.code import code_digest
from llmc.compiler.frontend.consumed import require_consumed
from llmc.compiler.pipeline.provenance import model_facts, model_name, remember_model, without_rings
from llmc.compiler.stages import OnStageReport, Stages
from llmc.compiler.text import text_files
from llmc.compiler.weights.recipes import SCALES
from llmc.compiler.weights.stage import (
    CONFIG,
    PLACEMENTS,
    TABLES,
    TENSORS,
    WEIGHTS,
    Described,
    bound_weights,
    weights_stage,
)
from llmc.errors import ArtifactError, CheckpointError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Target

SHOWN = 3
"""Mismatches that an error names."""

_FACTS = ("architecture", "layers", "kv_heads", "head_dim", "cache", "vocab_size")
_SHAPING = (
    "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_parameters", "hidden_act",
    "sliding_window", "layer_types",
)  # fmt: skip
"""Config keys that are compiled into programs. A key that a configuration leaves out has its architecture's default,
and is not compared."""


def why_unverified(target: Target, checkpoint: Checkpoint, options: CompileOptions) -> str | None:
    """Reason for the manifest why a compile cannot be verified; None where the checkpoint has weights.

    Raises InputError where a configuration alone is not enough for the target or the requested verification.
    """
    if checkpoint.tensor_names():
        return None
    if not target.description.config_only:
        from llmc.compiler.targets import offered, open_target

        able = ", ".join(name for name in offered() if open_target(name).description.config_only)
        raise InputError(
            f"device {options.device} needs the weights to compile, and {checkpoint.path} is only a configuration: "
            f"give the checkpoint as MODEL, or compile for one of: {able}"
        )
    if options.verify == "all":
        raise InputError(
            "--verify all needs weights to compare with, and a configuration has none; leave it out, and verify later "
            "with: llmc verify BUNDLE --reference MODEL"
        )
    return "no weights: verify with llmc verify BUNDLE --reference MODEL"


def bound(bundle: Path, weights: str, store: Store, report: OnStageReport | None = None) -> Path:
    """Folder in the store of the bundle with the weights of the named checkpoint, created on first use.

    Raises the errors of `bind`.
    """
    checkpoint = open_checkpoint(weights)
    with BundleFiles.open(bundle) as files:
        manifest = files.manifest
    _require_unbound(bundle, manifest)
    stages = Stages(store, checkpoint, _plan(bundle, manifest), report or (lambda _: None))
    code = code_digest(bind, bound_weights, weights_stage, text_files, type(checkpoint))
    identity = [manifest.digest, stages.checkpoint_digest(), model_name(weights), code]
    folder = store.layout.bundles / parse(digest_bytes(canonical_json(identity)))[:32]
    if _is_sound(folder):
        with suppress(OSError):
            os.utime(folder)
        return folder
    return bind(bundle, checkpoint, folder, store, report, name=weights)


def bind(
    bundle: Path, checkpoint: Checkpoint, output: Path, store: Store, report: OnStageReport | None = None, *,
    name: str | None = None,
) -> Path:  # fmt: skip
    """Write the bundle with the checkpoint's weights to `output`; `name` is the user's name for the checkpoint.

    Raises InputError for a bundle that has weights, CheckpointError for a checkpoint that does not match it, naming the
    first mismatches, ArtifactError for a damaged bundle, and CapacityError or UnwritableError without room. On an error
    `output` stays unchanged.
    """
    with BundleFiles.open(bundle) as files:
        manifest = files.manifest
        _require_unbound(bundle, manifest)
        described = _described(files)
        require_match(files, described, checkpoint)
        stages = Stages(store, checkpoint, _plan(bundle, manifest), report or (lambda _: None))
        built = bound_weights(stages, store.put_bytes(files.read(TENSORS)), store.put_bytes(files.read(TABLES)))
        added = {**text_files(stages), WEIGHTS: built["weights"].digest, PLACEMENTS: built["placements"].digest}
        added = {file: digest for file, digest in added.items() if file not in manifest.files}
        sources = {digest: files.path(digest) for digest in manifest.blobs}
        sources |= {digest: store.path(digest) for digest in added.values()}
        named = model_name(name or str(checkpoint.path))
        final = _manifest(manifest, stages, added, {d: p.stat().st_size for d, p in sources.items()}, named)
        write_bundle(output, final, sources)
    remember_bundle(store, final)
    remember_model(store, stages.checkpoint_digest(), name or str(checkpoint.path))
    return output


def require_match(files: BundleFiles, described: list[Described], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, naming the first mismatches, unless the weights fit the compiled configuration."""
    known = set(checkpoint.tensor_names())
    if not known:
        raise CheckpointError(
            f"{checkpoint.path} is only a configuration and has no weights to bind; name the folder or file that "
            "has the weights"
        )
    wrong = [*_differing_config(files, checkpoint), *_differing_tensors(described, checkpoint, known)]
    if wrong:
        more = f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN else ""
        raise CheckpointError(
            f"the weights of {checkpoint.path} do not match the configuration that {files.folder} was compiled from: "
            f"{'; '.join(wrong[:SHOWN])}{more}; name its own checkpoint, or compile for this one"
        )
    require_consumed(checkpoint)


def _differing_config(files: BundleFiles, checkpoint: Checkpoint) -> Iterator[str]:
    facts, needed = model_facts(checkpoint), without_rings(files.manifest.model)
    for name in _FACTS:
        if facts.get(name) != needed.get(name):
            yield f"{name} is {facts.get(name)!r}, the bundle needs {needed.get(name)!r}"
    mine, theirs = checkpoint.config, _json(files, CONFIG, dict)
    for name in _SHAPING:
        if name in mine and name in theirs and not _agree(mine[name], theirs[name]):
            yield f"{name} is {mine[name]!r}, the bundle needs {theirs[name]!r}"


def _agree(mine: Any, theirs: Any) -> bool:
    """Whether two values are equal in their common members; a GGUF file has its numbers in float32."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return all(_agree(mine[name], theirs[name]) for name in mine.keys() & theirs.keys())
    if isinstance(mine, int | float) and isinstance(theirs, int | float):
        return math.isclose(mine, theirs, rel_tol=1e-6)
    return bool(mine == theirs)


def _differing_tensors(described: list[Described], checkpoint: Checkpoint, known: set[str]) -> Iterator[str]:
    needed = {source for tensor in described for source in tensor["sources"]}
    tied = checkpoint.config.get("tie_word_embeddings", False)
    for lm_head in sorted(known.intersection(LM_HEADS) - needed if not tied else ()):
        yield f"{lm_head} is a separate tensor, the bundle needs one that is tied to the embedding"
    for tensor in described:
        if tensor["transform"] in SCALES:  # a described tensor covers its scales
            continue
        for source in tensor["sources"]:
            try:
                shape = list(checkpoint.shape(stored_name(source, known)))
            except CheckpointError:
                yield f"{source} is missing"
                continue
            wanted = tensor["shape"]
            if len(tensor["sources"]) > 1 or len(shape) < len(wanted):  # stacked: one source per layer
                wanted = wanted[1:]
            if shape != wanted:
                yield f"{source} is {shape}, the bundle needs {wanted}"


def _manifest(
    manifest: Manifest, stages: Stages, added: Mapping[str, str], sizes: Mapping[str, int], name: str
) -> Manifest:
    members = manifest.to_dict()
    facts, old = model_facts(stages.checkpoint), members.get("provenance", {})
    model = members["model"] | {"name": facts["name"]}
    for fact in ("eos_token_ids", "special_tokens", "sampling"):
        if fact in facts:
            model[fact] = model.get(fact) or facts[fact]
    build = dict(old.get("buildDefinition", {}))
    build["resolvedDependencies"] = [
        *(
            {"name": f"checkpoint/{role}", "digest": {"sha256": parse(digest)}}
            for role, digest in stages.checkpoint_files().items()
        ),
        *(_of_configuration(dependency) for dependency in build.get("resolvedDependencies", [])),
    ]
    provenance = {
        **old, "model": name, "checkpoint": stages.checkpoint_digest(), "buildDefinition": build,
        "bound": {
            "manifest": manifest.digest, "model": old.get("model", ""), "checkpoint": old.get("checkpoint", ""),
        },
    }  # fmt: skip
    return manifest.changed(model=model, files={**manifest.files, **added}, blobs=dict(sizes), provenance=provenance)


def _of_configuration(dependency: dict[str, Any]) -> dict[str, Any]:
    kind, slash, role = str(dependency.get("name", "")).partition("/")
    return {**dependency, "name": f"configuration/{role}"} if kind == "checkpoint" and slash else dependency


def _require_unbound(bundle: Path, manifest: Manifest) -> None:
    if not manifest.is_unbound:
        raise InputError(
            f"{bundle} already has weights; leave them out (only a bundle that was compiled with --config takes others)"
        )


def _plan(bundle: Path, manifest: Manifest) -> Plan:
    try:
        return Plan.from_json(json.dumps(manifest.plan), source=f"{bundle}: plan")
    except InputError as e:
        raise ArtifactError(f"{e}; compile it again") from e


def _described(files: BundleFiles) -> list[Described]:
    found: list[Described] = _json(files, TENSORS, list)
    for tensor in found:
        texts = (
            [tensor.get("name"), tensor.get("transform"), tensor.get("dtype")] if isinstance(tensor, dict) else [None]
        )
        lists = (tensor.get("sources"), tensor.get("shape")) if all(isinstance(t, str) for t in texts) else (None,)
        if not all(isinstance(found, list) for found in lists):
            raise ArtifactError(
                f"{files.folder}: {TENSORS} has {tensor!r:.100}, which describes no tensor; compile the bundle again"
            )
    return found


def _json(files: BundleFiles, name: str, kind: type) -> Any:
    try:
        found = json.loads(files.read(name))
    except (ValueError, RecursionError) as e:
        raise ArtifactError(f"{files.folder}: {name} cannot be read as JSON ({e}); compile the bundle again") from e
    if not isinstance(found, kind):
        raise ArtifactError(f"{files.folder}: {name} is not a {kind.__name__}; compile the bundle again")
    return found


def _is_sound(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        with BundleFiles.open(folder) as files:
            for digest in files.manifest.blobs:
                files.path(digest)
    except ArtifactError:
        return False
    return True
