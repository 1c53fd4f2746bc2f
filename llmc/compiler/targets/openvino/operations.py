"""The operations of a traced program (compiler/program/sized.py) as OpenVINO's nodes, each by its rule (aten.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmc.compiler.program.sized import DType, Operation, Ref, TracedProgram
from llmc.compiler.targets.openvino.aten import RULES, element_type
from llmc.compiler.targets.openvino.formats import WeightFormat
from llmc.errors import CompileError
from llmc.runtime.portable_program import DTYPES

Tables = Mapping[str, NDArray[np.float32]]
"""Computed constants of a program, by name."""

_TYPES = {
    "int32": ov.Type.i32, "int64": ov.Type.i32, "float32": ov.Type.f32, "float64": ov.Type.f32, "bool": ov.Type.boolean,
}  # fmt: skip
"""What OpenVINO holds for a dtype of the program: 64-bit numbers are 32-bit."""

_MATRICES = ("linear.default", "embedding.default")


class Operations:
    """Nodes for operations, over `values`: nodes by the program's names, to which `lower` adds what it makes."""

    def __init__(
        self, program: TracedProgram, tables: Tables, weights: WeightFormat, values: dict[str, Any]
    ) -> None:  # fmt: skip
        self._program = program
        self._tables = tables
        self._weights = weights
        self._constants = weights.constants
        self._values = values
        self._dtypes = {name: meta["dtype"] for name, meta in program.graph["tensor_values"].items()}
        self._last = ""

    def lower(self, operations: Iterable[Operation]) -> dict[str, Any]:
        """All values by name; operations whose values are there already are left out.

        Raises CompileError naming an operator that has no rule, or fails, and the weight before it.
        """
        for operation in operations:
            if operation.outputs[0] not in self._values:
                for name, value in zip(operation.outputs, self._applied(operation), strict=True):
                    self._values[name] = _as(value, _type(self._dtypes[name], name))
        return self._values

    def _applied(self, operation: Operation) -> list[Any]:
        weights = self._program.weights
        self._last = next((weights[r] for r in operation.refs() if r in weights), self._last)
        where = f"after {self._last}" if self._last else "before the first layer"
        rule = RULES.get(operation.operator)
        if rule is None:
            raise CompileError(
                f"operator aten.{operation.operator} ({where}) has no rule for OpenVINO; targets/openvino/"
                f"aten.py has those of {len(RULES)} operators: add one there"
            )
        given = {name: self._given(operation, name, v) for name, v in operation.arguments.items()}
        try:
            made = rule(self._constants, **given)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as e:
            raise CompileError(f"operator aten.{operation.operator} ({where}) has no form in OpenVINO: {e}") from e
        return list(made) if operation.several else [made]

    def _given(self, operation: Operation, argument: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._given(operation, argument, v) for v in value]
        if isinstance(value, DType):
            return _type(value.code, argument)
        if not isinstance(value, Ref):
            return value
        if value.name not in self._values:
            self._values[value.name] = self._weight(operation, argument, value.name)
        return self._values[value.name]

    def _weight(self, operation: Operation, argument: str, ref: str) -> Any:
        name = self._program.weights[ref]
        if name in self._tables:
            return self._constants.table(name, np.ascontiguousarray(self._tables[name], np.float32))
        shape = tuple(int(s["as_int"]) for s in self._program.graph["tensor_values"][ref]["sizes"])
        if operation.operator in _MATRICES and argument == "weight":
            return self._weights.matrix([name], [shape], looked_up=operation.operator == "embedding.default")
        return self._weights.vector(name, shape)


def _as(value: Any, kind: ov.Type) -> Any:
    return value if element_type(value) == kind else ops.convert(value, kind)


def _type(code: int, where: str) -> ov.Type:
    name = DTYPES.get(code, str(code))
    if name not in _TYPES:
        raise CompileError(f"{where} is {name}, which the portable form does not hold; it holds {', '.join(_TYPES)}")
    return _TYPES[name]
