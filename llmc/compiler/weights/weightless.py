"""Stages of the targets whose programs take their weights as inputs: the weights file of a traced program.

A program of dialect two_part holds no tensor; what it needs is described, so that the weights may come at compile time
(`bound_weights`) or when the bundle is bound to a checkpoint (bind.py), from the same description by the same code:

    tensors.json   [{"name", "transform": "dense" | "bf16" | "table", or those of weights/rows.py, "shape": [..],
                     "dtype": one of ITEM_BYTES,
                     "sources": the checkpoint's tensors, concatenated along the first axis; none of a table}]
    tables.npz     computed constants by name, float32
    config.json    the configuration that was compiled
    weights        tensors back to back, each at a multiple of 4096 bytes (weights/recipes.py)
    weights.json   {name: {"offset": bytes, "length": bytes, "dtype", "shape": [..]}}

A target that rolls layers into one body passes `stack`: a pure function from the described tensors to those that its
executables take, e.g. "model.layers.*.mlp.up_proj.weight" [layers, out, in] of the sources of all layers in order.
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
"""The end of the name of a quantised matrix's scales."""
ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}

Described = dict[str, Any]
"""One tensor of tensors.json."""

Stack = Callable[[Sequence[Described]], Sequence[Described]]


@dataclass(frozen=True)
class SharedFiles:
    """The files that all executables of a bundle share: `files`, by name.

    `tensors` is the digest of tensors.json, whether it is among the files or not: what a key of an executable names
    whose code depends on names, shapes and dtypes alone.
    """

    files: Mapping[str, str]
    tensors: str


def described_stage(stages: Stages, traced: Program, stack: Stack | None = None) -> Blob:
    """tensors.json of what executables take: the tensors of the traced program, after `stack`."""
    plain: Blob = traced.outputs["tensors"]
    if stack is None:
        return plain
    data = canonical_json(list(stack(json.loads(stages.store.get_bytes(plain.digest)))))
    components = {"tensors": plain.digest, "stacked": digest_bytes(data), "code": code_digest(described_stage)}
    return stages.run("describe", components, lambda workspace: {"tensors": workspace.put_bytes(data)}).outputs[
        "tensors"
    ]


def bound_weights(stages: Stages, tensors: Blob, tables: Blob) -> Mapping[str, Blob]:
    """The weights of `stages.checkpoint` as tensors.json and tables.npz, which the store holds, describe them.

    Outputs: "weights" and "placements" (weights.json). Raises CheckpointError.
    """
    return weights_stage(stages, tensors, tables, described_as="tensors").outputs


def shared_files(stages: Stages, traced: Program, stack: Stack | None = None) -> SharedFiles:
    """The files of a bundle that every executable reads: the weights or, of a configuration alone, what they must be.

    Raises CheckpointError.
    """
    tensors, tables = described_stage(stages, traced, stack), traced.outputs["tables"]
    if stages.checkpoint.tensor_names():
        built = bound_weights(stages, tensors, tables)
        files = {WEIGHTS: built["weights"].digest, PLACEMENTS: built["placements"].digest}
        return SharedFiles(files, tensors.digest)
    files = {TENSORS: tensors.digest, TABLES: tables.digest, CONFIG: _config_stage(stages).digest}
    return SharedFiles(files, tensors.digest)


def _config_stage(stages: Stages) -> Blob:
    """The configuration that was compiled, canonical: what weights are held against before they are bound."""
    data = canonical_json(without_path(stages.checkpoint.config))
    components = {"config": stages.config_digest, "code": code_digest(_config_stage)}
    return stages.run("config", components, lambda workspace: {"config": workspace.put_bytes(data)}).outputs["config"]
