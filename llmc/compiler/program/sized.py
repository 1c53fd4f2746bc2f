"""Bind a traced program (torch's model.json, see runtime/portable_program.py) to one bucket's sizes, without torch.

A traced program is a straight line of ATen operators whose sizes are arithmetic over B, Q and S, all of it over sizes
of inputs. `at` evaluates this arithmetic and the guards that tracing recorded, and replaces symbols in the operators by
numbers. This takes some milliseconds per bucket.
"""

from __future__ import annotations

import json
import math
import operator as builtin
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.compiler.checkpoint.adapter_layout import ADAPTERS
from llmc.errors import CompileError
from llmc.runtime.portable_program import FIXED_INPUTS, INFINITE, ProgramFields, output_names, weight_names

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape

ATEN = "torch.ops.aten."
OWN = "torch.ops.llmc."
"""Prefix of llmc's own operators (frontend/attention.py), which keep the prefix "llmc." in their names."""
SIZE = ATEN + "sym_size.int"
ASSERTION = ATEN + "_assert_scalar.default"
CHECKED_ELSEWHERE = ATEN + "_assert_tensor_metadata.default"
SIZE_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(builtin, name) for name in (
        "add", "sub", "mul", "floordiv", "mod", "pow", "neg", "eq", "ne", "le", "ge", "lt", "gt", "and_", "or_")},
    "torch.sym_min": min, "torch.sym_max": max, "torch.sym_not": builtin.not_, "torch.sym_int": int,
    "math.trunc": math.trunc,
}  # fmt: skip
_INT64 = 5
_NUMBERS = ("as_sym_int", "as_sym_bool", "as_sym_float")
_LITERALS = ("as_int", "as_ints", "as_float", "as_floats", "as_bool", "as_bools")
_ABSENT = ("as_none", "as_device", "as_layout", "as_memory_format")
"""Arguments without a meaning here, because XLA chooses where results are stored."""


@dataclass(frozen=True)
class Ref:
    """A tensor, by its name in the program."""

    name: str


@dataclass(frozen=True)
class DType:
    """A dtype argument, by torch's number."""

    code: int


@dataclass(frozen=True)
class Operation:
    """One operator, named "name.overload", with arguments by ATen's names: Ref, DType, numbers, or lists of them.
    Absent arguments are left out, except in lists, where they are None."""

    operator: str
    arguments: Mapping[str, Any]
    outputs: tuple[str, ...]
    several: bool
    """Whether the operator returns its outputs in a list or tuple."""

    def __str__(self) -> str:
        return f"{self.operator}({', '.join(f'{k}={_shown(v)}' for k, v in self.arguments.items())})"

    def refs(self) -> list[str]:
        """The tensors it reads, in order."""
        flat = [a for v in self.arguments.values() for a in (v if isinstance(v, list) else [v])]
        return [a.name for a in flat if isinstance(a, Ref)]


@dataclass(frozen=True)
class BoundProgram:
    """A program at one bucket's sizes. Inputs are `takes`, `cache` and `weights`, all by name.

    `weights` maps the program's names to the checkpoint's. `cache` has key and value of each layer in turn and is empty
    without context. `outputs` are logits, with `top` the largest and their ids, then key and value of each layer.
    """

    operations: tuple[Operation, ...]
    takes: tuple[str, ...]
    weights: Mapping[str, str]
    cache: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: Mapping[str, int]
    """torch's dtype number of every tensor."""
    top: bool

    @property
    def new_entries(self) -> tuple[str, ...]:
        """The outputs that go into the cache: key and value of each layer in turn."""
        return self.outputs[3 if self.top else 1 :]

    def text(self) -> str:
        """Inputs, operations and outputs, one a line."""
        inputs = [f"input %{name}" for name in (*self.takes, *self.cache)]
        weights = [f"weight %{name} = {stored}" for name, stored in self.weights.items()]
        nodes = [f"{', '.join(f'%{o}' for o in n.outputs)} = {n}" for n in self.operations]
        return "\n".join([*inputs, *weights, *nodes, *(f"output %{name}" for name in self.outputs)]) + "\n"


@dataclass(frozen=True)
class TracedProgram:
    """A traced program with symbolic sizes."""

    graph: ProgramFields
    takes: tuple[str, ...]
    weights: Mapping[str, str]
    cache: tuple[str, ...]
    top: bool

    @classmethod
    def parse(cls, data: bytes, takes: Sequence[str] = ()) -> TracedProgram:
        """Parse the file written by tracing (program/to_export.py, `serialise`). `takes` are the program's inputs
        before cache and weights, by default those of a step. Raises ValueError for a program with other inputs."""
        try:
            fields: ProgramFields = json.loads(data)
            graph = fields["graph_module"]["graph"]
            inputs = [i["as_tensor"]["name"] for i in graph["inputs"]]
            names = weight_names(fields)
        except (KeyError, TypeError, IndexError) as e:
            raise ValueError(f"a malformed program ({type(e).__name__}: {e})") from e
        if not takes:
            takes = (*FIXED_INPUTS, ADAPTERS) if inputs[len(FIXED_INPUTS) :][:1] == [ADAPTERS] else FIXED_INPUTS
        fixed = len(takes)
        if inputs[:fixed] != list(takes) or len(inputs) < fixed + len(names):
            raise ValueError(f"the program takes {inputs[:4]} …, not {', '.join(takes)}")
        first = len(inputs) - len(names)
        return cls(
            graph, tuple(takes), dict(zip(inputs[first:], names, strict=True)), tuple(inputs[fixed:first]),
            _returns_top(graph),
        )  # fmt: skip

    def text(self) -> str:
        """Inputs, nodes with symbolic sizes, and outputs, one a line."""

        def said(argument: Mapping[str, Any]) -> str:
            ((kind, value),) = argument.items()
            if kind == "as_tensor":
                return f"%{value['name']}"
            if isinstance(value, list):
                items = ({"as_tensor": item} if kind == "as_tensors" else item for item in value)
                return f"[{', '.join(said(item) if isinstance(item, Mapping) else str(item) for item in items)}]"
            return str(value.get("as_name", value)) if isinstance(value, Mapping) else str(value)

        lines = [f"input {said(i)}" for i in self.graph["inputs"] if i["as_tensor"]["name"] not in self.weights]
        lines += [f"weight %{name} = {stored}" for name, stored in self.weights.items()]
        for node in self.graph["nodes"]:
            given = ", ".join(f"{i['name']}={said(i['arg'])}" for i in node["inputs"] if "as_none" not in i["arg"])
            built = ", ".join(said(o) for o in node["outputs"])
            lines.append(f"{built} = {node['target'].removeprefix(ATEN)}({given})")
        return "\n".join([*lines, *(f"output {said(o)}" for o in self.graph["outputs"])]) + "\n"

    def at(self, batch: int, query: int, context: int, cache: CacheShape | None = None) -> BoundProgram:
        """Bind the program to B, Q and S, over a `cache` with ring buffers if given. Raises CompileError where a guard
        of the trace does not hold there."""
        offsets = offsets_of(self.cache, context, cache)
        binding = _Binding(self.graph["tensor_values"], {"B": batch, "Q": query, "S": context}, offsets)
        operations = [o for node in self.graph["nodes"] if (o := binding.operation(node)) is not None]
        outputs = tuple(o["as_tensor"]["name"] for o in self.graph["outputs"])
        dtypes = {name: meta["dtype"] for name, meta in self.graph["tensor_values"].items()}
        return BoundProgram(
            _needed(operations, outputs), self.takes, self.weights, self.cache, outputs, dtypes, self.top
        )


def offsets_of(inputs: Sequence[str], context: int, cache: CacheShape | None) -> dict[str, int]:
    """Number of slots of each cache input of a program of that context; recurrent state has none."""
    if cache is None:
        return dict.fromkeys(inputs, context)
    return {name: t.token_slots(context) for name, t in zip(inputs, cache, strict=bool(inputs))}


def _shown(value: Any) -> str:
    if isinstance(value, Ref):
        return f"%{value.name}"
    if isinstance(value, DType):
        return f"dtype {value.code}"
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list) else str(value)


class _Binding:
    """Numbers for the symbols of one walk over the nodes."""

    def __init__(self, metas: Mapping[str, Any], sizes: Mapping[str, int], offsets: Mapping[str, int]) -> None:
        self._metas = metas
        self._sizes = sizes
        self._offsets = offsets
        self._numbers: dict[str, Any] = {}

    def operation(self, node: ProgramFields) -> Operation | None:
        """The node with numbers for symbols; None for size arithmetic, or for a guard that holds."""
        target = node["target"]
        if target == CHECKED_ELSEWHERE:
            return None
        given = {i["name"]: v for i in node["inputs"] if (v := self._value(i["arg"])) is not None}
        if target == SIZE:
            self._numbers[_number_name(node)] = self._size(given["self"].name, given["dim"])
        elif target in SIZE_ARITHMETIC:
            self._numbers[_number_name(node)] = SIZE_ARITHMETIC[target](*given.values())
        elif target == ASSERTION:
            if not given["self"]:
                at = ", ".join(f"{k}={v}" for k, v in self._sizes.items())
                raise CompileError(f"a guard of the traced program does not hold at {at}: {given.get('assert_msg')}")
        elif not target.startswith((ATEN, OWN)):
            raise CompileError(f"the traced program calls {target!r:.80}, which is not an ATen operator")
        else:
            names, several = output_names(node)
            return Operation(target.removeprefix(ATEN).removeprefix("torch.ops."), given, tuple(names), several)
        return None

    def _size(self, name: str, dim: int) -> int:
        size = self._metas[name]["sizes"][dim]
        if "as_int" in size:
            return int(size["as_int"])
        if dim == 2:
            return self._offsets[name]
        return self._sizes["BQ"[dim]]

    def _value(self, tagged: Mapping[str, Any]) -> Any:
        ((kind, value),) = tagged.items()
        if kind in _ABSENT:
            return None
        if kind == "as_float" and value in INFINITE:
            return INFINITE[value]
        if kind in _LITERALS or kind == "as_string":
            return value
        if kind == "as_tensor":
            return Ref(value["name"])
        if kind == "as_tensors":
            return [Ref(v["name"]) for v in value]
        if kind == "as_optional_tensors":
            return [self._value(v) for v in value]
        if kind in _NUMBERS:
            ((inner, content),) = value.items()
            return self._numbers[content] if inner == "as_name" else content
        if kind == "as_sym_ints":
            return [self._value({"as_sym_int": v}) for v in value]
        if kind == "as_scalar_type":
            return DType(value)
        raise CompileError(f"the traced program has an argument of kind {kind!r:.40}")


def _returns_top(graph: ProgramFields) -> bool:
    """Whether the third output is the ids of the largest logits, int64, rather than a layer's value."""
    if len(graph["outputs"]) < 3:
        return False
    third = graph["outputs"][2]["as_tensor"]["name"]
    return bool(graph["tensor_values"][third]["dtype"] == _INT64)


def _number_name(node: ProgramFields) -> str:
    (output,) = node["outputs"]
    ((_, named),) = output.items()
    return str(named["as_name"])


def _needed(operations: Sequence[Operation], outputs: Sequence[str]) -> tuple[Operation, ...]:
    needed = set(outputs)
    kept: list[Operation] = []
    for operation in reversed(operations):
        if needed.intersection(operation.outputs):
            kept.append(operation)
            needed.update(operation.refs())
    return tuple(reversed(kept))
