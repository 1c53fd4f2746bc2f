"""A program's operations over JAX arrays, each by its rule (operators.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from llmc.compiler.program.sized import BoundProgram, DType, Operation, Ref
from llmc.compiler.targets.xla.operators import RULES
from llmc.errors import CompileError
from llmc.runtime.portable_program import DTYPES

Array = Any
_NARROW = {"int64": "int32", "float64": "float32"}


def narrowed(code: int) -> np.dtype[Any]:
    """The dtype that XLA holds for torch's dtype number `code`: 64-bit numbers are 32-bit."""
    name = DTYPES[code]
    return jnp.dtype(_NARROW.get(name, name))


def evaluate(program: BoundProgram, operations: Iterable[Operation], values: dict[str, Array]) -> dict[str, Array]:
    """Run `operations` over `values` (arrays by name), which takes what they make, and return it.

    Raises CompileError naming an operator that has no rule, or that fails, and the layer it came from.
    """
    last = ""
    for operation in operations:
        last = next((program.weights[r] for r in operation.refs() if r in program.weights), last)
        rule = RULES.get(operation.operator)
        if rule is None:
            raise CompileError(
                f"operator aten.{operation.operator} ({_place(last)}) has no rule for XLA; targets/xla/"
                f"operators.py has those of {len(RULES)} operators: add one there"
            )
        try:
            result = rule(**{name: _given(v, values) for name, v in operation.arguments.items()})
        except Exception as e:
            raise CompileError(
                f"operator aten.{operation.operator} ({_place(last)}) cannot be lowered to XLA: {e}"
            ) from e
        for name, value in zip(operation.outputs, result if operation.several else [result], strict=True):
            values[name] = value.astype(narrowed(program.dtypes[name]))
    return values


def _place(weight: str) -> str:
    return f"after {weight}" if weight else "before the first layer"


def _given(argument: Any, values: Mapping[str, Array]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, DType):
        return narrowed(argument.code)
    if isinstance(argument, list):
        return [_given(a, values) for a in argument]
    return argument
