"""The weights file of a lowering, as a cached stage: what its recipes name, made from the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmc.compiler.stages import Stages, code_digest

if TYPE_CHECKING:
    from llmc.artifacts.blobs import Blob
    from llmc.artifacts.entries import Entry
    from llmc.artifacts.workspace import Workspace


def weights_stage(stages: Stages, recipes: Blob, tables: Blob, code: tuple[str, ...]) -> Entry:
    """An entry with `weights`, the file, and `placements`, JSON {name: {"offset", "length"}} in bytes.

    `recipes` is the JSON of lowering/recipes.py's, `tables` an npz of the computed ones, `code` the modules whose
    source the file depends on. Raises CheckpointError.
    """
    components = {"recipes": recipes.digest, "tables": tables.digest, **stages.reading(), "code": code_digest(*code)}

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        import numpy as np

        from llmc.compiler.lowering.recipes import Recipe, write_weights

        made = [Recipe.from_json(r) for r in json.loads(stages.store.get_bytes(recipes.digest))]
        with np.load(stages.path(tables)) as arrays, workspace.writer() as out:
            placed = write_weights(made, stages.checkpoint, arrays, out)
        assert out.blob is not None
        placements = {name: {"offset": p.offset, "length": p.length} for name, p in placed.items()}
        return {
            "weights": out.blob,
            "placements": workspace.put_bytes(json.dumps(placements, sort_keys=True).encode()),
        }

    return stages.run("weights", components, build)
