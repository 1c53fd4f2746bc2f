"""The weights file of a lowering as a cached stage, built from the checkpoint by recipes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmc.artifacts.key import canonical_json
from llmc.compiler.code import code_digest
from llmc.compiler.stages import Stages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
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
