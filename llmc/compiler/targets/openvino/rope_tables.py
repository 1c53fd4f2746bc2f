"""Cosines and sines of positions in a traced program, as tables over positions 0 … P − 1.

Which operators depend on positions alone is read off the program: on past_lengths, on computed constants and on what is
made of those. Their tables are computed once, by those very operators in float32, so that every scaling rule a model
has is kept without being named here. Devices that compute in float16 could not: it counts to 2048 in ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmc.compiler.program.sized import Operation, TracedProgram
from llmc.compiler.targets.openvino.constants import Constants
from llmc.compiler.targets.openvino.formats import WeightFormat
from llmc.compiler.targets.openvino.operations import Operations, Tables
from llmc.errors import CompileError

_ANGLES = ("cos.default", "sin.default")
_PAST = "past_lengths"


@dataclass(frozen=True)
class AngleTable:
    """`table` [P, …] of values by position; what the program makes of it is [B, 1 …, Q, …] with `ones` sizes of 1."""

    table: NDArray[np.float32]
    ones: int

    def look_up(self, constants: Constants, positions: Any) -> Any:
        """The values at `positions` [B, Q], in the program's shape; behind the last position they are the last's."""
        name = f"angles_{hashlib.sha256(self.table.tobytes()).hexdigest()[:16]}"
        there = ops.minimum(positions, constants.small(len(self.table) - 1))
        found = ops.gather(constants.table(name, self.table), there, constants.small(0))
        return ops.unsqueeze(found, constants.small(list(range(1, 1 + self.ones)))) if self.ones else found


def angle_tables(program: TracedProgram, tables: Tables, positions: int, context: int) -> dict[str, AngleTable]:
    """The tables of `program`, by the names of the values that they stand for; `positions` is P, at least 2.

    Raises CompileError where cosines or sines of positions have another shape than [B, 1 …, Q, …].
    """
    positional = _positional(program.at(1, positions, context).operations, program, tables)
    names = [o.outputs[0] for o in positional if o.operator in _ANGLES]
    if not names:
        return {}
    past = ops.parameter([1], ov.Type.i32)
    values = Operations(program, tables, WeightFormat(Constants()), {_PAST: past}).lower(_needed(positional, names))
    model = ov.Model([ops.result(values[name]) for name in names], [past], "angles")
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    made = compiled({0: np.zeros(1, np.int32)})
    return {name: _table(name, made[i], positions) for i, name in enumerate(names)}


def _positional(operations: Iterable[Operation], program: TracedProgram, tables: Tables) -> list[Operation]:
    """The operations that depend on past_lengths and computed constants, and on no token, weight or cache."""
    known = {_PAST} | {ref for ref, name in program.weights.items() if name in tables}
    found = []
    for operation in operations:
        if known.issuperset(operation.refs()):
            known.update(operation.outputs)
            found.append(operation)
    return found


def _needed(operations: list[Operation], names: Iterable[str]) -> list[Operation]:
    wanted, kept = set(names), []
    for operation in reversed(operations):
        if wanted.intersection(operation.outputs):
            wanted.update(operation.refs())
            kept.append(operation)
    return kept[::-1]


def _table(name: str, value: NDArray[np.float32], positions: int) -> AngleTable:
    sizes = list(value.shape)
    at = sizes.index(positions) if positions in sizes else 0
    if at == 0 or any(n != 1 for n in sizes[:at]):
        raise CompileError(
            f"{name}, which depends on positions, is {sizes} at one row of {positions}: not [B, 1 …, Q, …]"
        )
    return AngleTable(np.array(value, np.float32).reshape(sizes[at:]), at - 1)
