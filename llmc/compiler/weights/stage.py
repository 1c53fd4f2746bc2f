"""The weights file of a lowering as a cached stage, built from the checkpoint by recipes.

A program of dialect two_part holds no tensor, only a description of its weights. The same code builds them at compile
time, or when the bundle is bound to a checkpoint (pipeline/bind.py):

    tensors.json   [{"name", "transform": "dense" | "bf16" | "table", or int8_* and fp8_* of weights/recipes.py,
                     "shape": [..], "dtype": one of ITEM_BYTES,
                     "sources": the checkpoint's tensors, concatenated along the first axis; none for a table}]
    tables.npz     computed constants by name, float32
    config.json    the configuration that was compiled
    weights        tensors back to back, each at a multiple of 4096 bytes (weights/recipes.py)
    weights.json   {name: {"offset": bytes, "length": bytes, "dtype", "shape": [..]}}

A target that rolls layers into one loop body passes `stack`: a pure function from the described tensors to those that
its executables take, e.g. "model.layers.*.mlp.up_proj.weight" [layers, out, in] from all layers' sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.checkpoint.base import without_path
from llmc.compiler.code import code_digest
from llmc.compiler.stages import Stages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.program.program import Program
    from llmc.compiler.weights.recipes import TensorSource


_DESCRIBED = ("dtype", "shape")


def weights_stage(stages: Stages, recipes: Blob, tables: Blob, described_as: str = "recipes") -> Entry:
    """An entry with `weights`, the file, and `placements`, JSON {name: {"offset", "length"}} in bytes.

    `recipes` is JSON as in weights/recipes.py; the key names it `described_as`. Recipes that also have a "dtype" and a
    "shape" keep them in `placements`. `tables` is an npz of the computed constants. Raises CheckpointError.
    """
    components = {
        described_as: recipes.digest,
        "tables": tables.digest,
        **stages.reading(),
        "code": code_digest(weights_stage, type(stages.checkpoint)),
    }

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        import numpy as np

        described = json.loads(stages.store.get_bytes(recipes.digest))
        with np.load(stages.path(tables)) as arrays:
            return written_weights(described, stages.checkpoint, arrays, workspace, stages.checkpoint.forget)

    return stages.run("weights", components, build)


def stored_weights(stages: Stages, tensors: Mapping[str, str]) -> Entry:
    """An entry as of `weights_stage`, with the checkpoint's own tensors in float32. `tensors` maps names in the file to
    names in the checkpoint. Raises CheckpointError."""
    components = {
        "tensors": canonical_json(tensors).decode(),
        **stages.reading(),
        "code": code_digest(stored_weights, type(stages.checkpoint)),
    }

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        checkpoint = stages.checkpoint
        described = [
            {
                "name": name, "transform": "dense", "sources": [stored], "dtype": "float32",
                "shape": list(checkpoint.tensor(stored).shape),
            }
            for name, stored in tensors.items()
        ]  # fmt: skip
        return written_weights(described, checkpoint, {}, workspace)

    return stages.run("weights", components, build)


def written_weights(
    described: Sequence[Mapping[str, Any]], source: TensorSource, tables: Mapping[str, NDArray[Any]],
    workspace: Workspace, done: Callable[[], None] = lambda: None,
) -> dict[str, Blob]:  # fmt: skip
    """Build `weights` and `placements` as in `weights_stage`. `described`: recipes with a "dtype" and a "shape"; they
    read the tensors of `source`. `done` is called after each tensor. Raises CheckpointError."""
    from llmc.compiler.weights.recipes import Recipe, write_weights

    with workspace.writer() as out:
        placed = write_weights([Recipe.from_json(r) for r in described], source, tables, out, done)
    assert out.blob is not None  # set when the block ends without an error
    placements = {
        r["name"]: {
            "offset": placed[r["name"]].offset, "length": placed[r["name"]].length,
            **{member: r[member] for member in _DESCRIBED if member in r},
        }
        for r in described
    }  # fmt: skip
    return {"weights": out.blob, "placements": workspace.put_bytes(canonical_json(placements))}


TENSORS, TABLES, CONFIG = "tensors.json", "tables.npz", "config.json"
WEIGHTS, PLACEMENTS = "weights", "weights.json"
SCALE = "_scale"
"""Suffix of the name of a quantized matrix's scales."""
ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}

Described = dict[str, Any]
"""One entry of tensors.json."""

Stack = Callable[[Sequence[Described]], Sequence[Described]]


@dataclass(frozen=True)
class SharedFiles:
    """Files that all executables of a bundle share, by name. `tensors`: digest of tensors.json, which may be absent
    from `files`; a key component of executables whose code depends on names, shapes and dtypes only."""

    files: Mapping[str, str]
    tensors: str


def described_stage(stages: Stages, traced: Program, stack: Stack | None = None) -> Blob:
    """tensors.json of the tensors that executables take: those of the traced program, after `stack`."""
    plain: Blob = traced.outputs["tensors"]
    if stack is None:
        return plain
    data = canonical_json(list(stack(json.loads(stages.store.get_bytes(plain.digest)))))
    components = {"tensors": plain.digest, "stacked": digest_bytes(data), "code": code_digest(described_stage)}
    entry = stages.run("describe", components, lambda workspace: {"tensors": workspace.put_bytes(data)})
    return entry.outputs["tensors"]


def bound_weights(stages: Stages, tensors: Blob, tables: Blob) -> Mapping[str, Blob]:
    """Build the weights of `stages.checkpoint` from the stored tensors.json and tables.npz. Outputs: "weights" and
    "placements" (weights.json). Raises CheckpointError."""
    return weights_stage(stages, tensors, tables, described_as="tensors").outputs


def shared_files(stages: Stages, traced: Program, stack: Stack | None = None) -> SharedFiles:
    """The shared files of a bundle: the weights, or their description if the checkpoint is a configuration only. Raises
    CheckpointError."""
    tensors, tables = described_stage(stages, traced, stack), traced.outputs["tables"]
    if stages.checkpoint.tensor_names():
        built = bound_weights(stages, tensors, tables)
        files = {WEIGHTS: built["weights"].digest, PLACEMENTS: built["placements"].digest}
        return SharedFiles(files, tensors.digest)
    files = {TENSORS: tensors.digest, TABLES: tables.digest, CONFIG: _config_stage(stages).digest}
    return SharedFiles(files, tensors.digest)


def _config_stage(stages: Stages) -> Blob:
    """The compiled configuration in canonical form, which weights are checked against when they are bound."""
    data = canonical_json(without_path(stages.checkpoint.config))
    components = {"config": stages.config_digest, "code": code_digest(_config_stage)}
    return stages.run("config", components, lambda workspace: {"config": workspace.put_bytes(data)}).outputs["config"]
