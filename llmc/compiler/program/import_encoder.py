"""A traced model without a cache (frontend/encode.py) → graph language: every operator stays, positions included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import fx
from torch.export import ExportedProgram

from llmc.compiler.program.import_fx import Importer
from llmc.compiler.program.ir import Graph, Value
from llmc.runtime.executors.encoders.base import LENGTHS, TOKEN_IDS, TYPE_IDS

RESULT = "result"
"""The one output: hidden states, or logits."""


def import_encoder(program: ExportedProgram) -> Graph:
    """Translate `program`: inputs by their names, the output RESULT, weights by their names in the program without
    "model." before them. Raises CompileError naming an operator that has no form."""
    return _EncoderImporter(program, 0, None).run()


class _EncoderImporter(Importer):
    axes: ClassVar[Mapping[str, str]] = {TOKEN_IDS: "BQ", LENGTHS: "B", TYPE_IDS: "BQ"}

    def _positional(self) -> set[fx.Node]:
        return set()

    def _names(self, users: int) -> tuple[list[str], list[str]]:
        return list(self.axes)[:users], [RESULT]

    def _held(self, node: fx.Node, spec: Any) -> None:
        """A table of float32 or int64, such as the frequencies of rotary positions."""
        held = self.program.state_dict.get(spec.target, self.program.constants.get(spec.target))
        if isinstance(held, torch.Tensor):
            dtype = torch.float32 if held.is_floating_point() else torch.int64
            name = str(dtype).removeprefix("torch.")
            value = self.values[node] = Value(f"table_{node.name}", tuple(held.shape), name)
            self.out.tables[value] = held.detach().to(dtype).numpy()
