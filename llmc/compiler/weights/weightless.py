"""Weights as separate inputs: stages of targets whose programs take their weights at run time.

A program of dialect two_part holds no tensor, only a description of its weights. The same code builds the weights from
that description, at compile time (`bound_weights`) or when the bundle is bound to a checkpoint (bind.py):

    tensors.json   [{"name", "transform": "dense" | "bf16" | "table", or those of weights/rows.py, "shape": [..],
                     "dtype": one of ITEM_BYTES,
                     "sources": the checkpoint's tensors, concatenated along the first axis; none for a table}]
    tables.npz     computed constants by name, float32
    config.json    the configuration that was compiled
    weights        tensors back to back, each at a multiple of 4096 bytes (weights/recipes.py)
    weights.json   {name: {"offset": bytes, "length": bytes, "dtype", "shape": [..]}}

A target that rolls layers into one loop body passes `stack`: a pure function from the described tensors to those that
its executables take, e.g. "model.layers.*.mlp.up_proj.weight" [layers, out, in] from the sources of all layers in
order.
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
from llmc.compiler.weights.stage import weights_stage

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.compiler.program.program import Program

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
    """Files that all executables of a bundle share: `files`, by name. `tensors`: digest of tensors.json, which may be
    absent from `files`. It is a key component of executables whose code depends on names, shapes and dtypes only."""

    files: Mapping[str, str]
    tensors: str


def described_stage(stages: Stages, traced: Program, stack: Stack | None = None) -> Blob:
    """tensors.json of the tensors that executables take: those of the traced program, after `stack`."""
    plain: Blob = traced.outputs["tensors"]
    if stack is None:
        return plain
    data = canonical_json(list(stack(json.loads(stages.store.get_bytes(plain.digest)))))
    components = {"tensors": plain.digest, "stacked": digest_bytes(data), "code": code_digest(described_stage)}
    return stages.run("describe", components, lambda workspace: {"tensors": workspace.put_bytes(data)}).outputs[
        "tensors"
    ]


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
