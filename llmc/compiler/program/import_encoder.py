"""A traced model without a cache (frontend/encode.py) → graph language: every operator stays, positions included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import fx
from torch.export import ExportedProgram

from llmc.compiler.program.import_fx import Importer
from llmc.compiler.program.ir import Graph
from llmc.runtime.executors.encoders import LENGTHS, TOKEN_IDS, TYPE_IDS

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
