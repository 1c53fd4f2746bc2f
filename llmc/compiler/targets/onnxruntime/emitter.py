"""The ONNX graph emitter: nodes, constants, external tensors, and values that many nodes share."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from llmc.compiler.program.ir import Dim, Graph, Node, Value
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.compiler.weights.recipes import Recipe
from llmc.errors import CompileError

OWN = "llmc"
"""The domain of llmc's own operators (compiler/targets/onnxruntime/kernels)."""
LOGIT_ROWS = "logit_rows"
ROWS = "rows"
DECODING = "decoding"
"""The input [1] int64: the number of leading tokens that belong to decode rows; the others are prefill tokens."""
STARTS = "first_token_"
"""Name prefix, followed by a window, of the input with that window's cache starts
(runtime/executors/onnxruntime/executor.py).
"""
ONNX_TYPES = {
    "float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32, "bool": TensorProto.BOOL,
}  # fmt: skip
"""ONNX types by the graph language's type name (program/ir.py)."""
_UNPLACED = "weights"
_MANY = 16
_ARITHMETIC = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.FloorDiv: "Div"}


class Emitter:
    """Emits the nodes of one model in order. `normed`: outputs of norms; `shared`: values that many nodes read."""

    def __init__(self, graph: Graph, options: OnnxOptions) -> None:
        self.graph = graph
        self.options = options
        self.nodes: list[Any] = []
        self.initializers: dict[str, TensorProto] = {}
        self.recipes: list[Recipe] = []
        self.shared: dict[str, str] = {}
        self.normed: set[Value | None] = set()
        self.starting: dict[str, Any] = {}
        """Inputs with cache starts, by name."""

    def is_new(self, name: str) -> bool:
        """Whether a shared value was not requested before: its nodes must then be added."""
        new = name not in self.shared
        self.shared.setdefault(name, name)
        return new

    def add(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attrs: Any) -> str:
        """Add a node, and return the name of its first output."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attrs))
        return outputs[0]

    def apply(self, op: str, node: Node, *more: str, domain: str = "", **attrs: Any) -> None:
        """Add `op` over the node's first input and `more` ones, as the node's output."""
        self.add(op, [self.name(node.inputs[0]), *more], [node.out.name], domain, **attrs)

    def const(self, values: Any, dtype: type = np.int64) -> str:
        """Return the name of a constant; equal values share one."""
        array: NDArray[Any] = np.asarray(values, dtype)
        values = array.ravel().tolist() if array.size < _MANY else [sha256(array.tobytes()).hexdigest()]
        name = f"const_{dtype.__name__}_{'_'.join(map(str, values))}_{'x'.join(map(str, array.shape))}"
        if name not in self.initializers:
            self.initializers[name] = helper.make_tensor(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.tobytes(), raw=True
            )
        return name

    def external(self, recipe: Recipe, dtype: int, shape: tuple[int, ...]) -> str:
        """Declare a tensor stored in the weights file."""
        if recipe.name not in self.initializers:
            tensor = TensorProto(name=recipe.name, data_type=dtype, data_location=TensorProto.EXTERNAL)
            tensor.dims.extend(shape)
            tensor.external_data.add(key="location", value=_UNPLACED)
            self.initializers[recipe.name] = tensor
            self.recipes.append(recipe)
        return recipe.name

    def dense(self, value: Value) -> str:
        """Return the name of a weight or table in float32."""
        shape = tuple(int(d) for d in value.shape)
        if value in self.graph.tables:
            return self.external(Recipe(value.name, "table", ()), TensorProto.FLOAT, shape)
        name = self.graph.weights[value]
        return self.external(Recipe(name, "dense", (name,)), TensorProto.FLOAT, shape)

    def sizes(self, dims: Sequence[Dim]) -> str:
        """Return a shape [n] int64; symbols are read from inputs. Raises CompileError for an unknown one."""
        if all(isinstance(d, int) for d in dims):
            return self.const(dims)
        name = f"shape_{'_'.join(map(str, dims)).replace(' ', '')}"
        if self.is_new(name):
            self.add("Concat", [self._size(d) for d in dims], [name], axis=0)
        return name

    def _size(self, dim: Dim) -> str:
        if isinstance(dim, int):
            return self.const([dim])
        name = f"size_{dim.replace(' ', '')}"
        if self.is_new(name):
            self._measure(ast.parse(dim, mode="eval").body, name)
        return name

    def _measure(self, tree: ast.expr, name: str) -> None:
        match tree:
            case ast.Name(symbol) if found := self._axis(symbol):
                self.add("Shape", [found[0]], [name], start=found[1], end=found[1] + 1)
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
                sides = [self._side(side) for side in (left, right)]
                self.add(_ARITHMETIC[type(op)], sides, [name])
            case _:
                raise CompileError(f"a size of {ast.unparse(tree)} is measured on no input of the model")

    def _side(self, tree: ast.expr) -> str:
        return self._size(int(tree.value) if isinstance(tree, ast.Constant) else ast.unparse(tree))  # type: ignore[arg-type]

    def _axis(self, symbol: str) -> tuple[str, int] | None:
        """An input and axis whose size is this symbol; the first inputs are the same in every form."""
        for name, value in self.graph.inputs.items():
            if symbol in value.shape:
                return name, value.shape.index(symbol)
        return None

    def rolls(self, node: Node) -> bool:
        """Whether the cache of an attention node may begin at a later token than the first."""
        return self.options.rolls and int(node.attrs["window"]) > 0

    def starts(self, window: int) -> str:
        """Return the input with the first cached token of each row for that window, [B] int64."""
        name = f"{STARTS}{window}"
        self.starting[name] = helper.make_tensor_value_info(name, TensorProto.INT64, ["B"])
        return name

    def held_lengths(self, node: Node) -> str:
        """Return each row's number of cached tokens in the node's cache, [B]."""
        if not self.rolls(node):
            return "past_lengths"
        starts = self.starts(int(node.attrs["window"]))
        if self.is_new(f"{starts}_held"):
            self.add("Sub", ["past_lengths", starts], [f"{starts}_held"])
        return f"{starts}_held"

    def positions(self) -> str:
        """Return each token's position in its sequence, [B, Q] int64."""
        if self.is_new("positions"):
            self.add("Shape", ["token_ids"], ["tokens"], start=1, end=2)
            self.add("Squeeze", ["tokens"], ["token_count"])
            columns = self.add("Range", [self.const(0), "token_count", self.const(1)], ["token_columns"])
            if self.options.panels:
                self._positions_of_rows(columns)
            else:
                self.add("Unsqueeze", ["past_lengths", self.const([1])], ["past_column"])
                self.add("Add", ["past_column", columns], ["positions"])
        return "positions"

    def _positions_of_rows(self, columns: str) -> None:
        """Token t of row (slot, past, first, tokens) is at past + t − first: a sum over rows, one of which holds it."""
        for i, part in ((1, "past"), (2, "first"), (3, "tokens")):
            self.add("Slice", [ROWS, self.const([i]), self.const([i + 1]), self.const([1])], [f"rows_{part}"])
        self.add("Add", ["rows_first", "rows_tokens"], ["rows_end"])
        self.add("GreaterOrEqual", [columns, "rows_first"], ["rows_begun"])
        self.add("Less", [columns, "rows_end"], ["rows_unfinished"])
        self.add("And", ["rows_begun", "rows_unfinished"], ["rows_hold"])
        self.add("Cast", ["rows_hold"], ["rows_held"], to=TensorProto.INT64)
        self.add("Sub", ["rows_past", "rows_first"], ["rows_shift"])
        self.add("Mul", ["rows_held", "rows_shift"], ["rows_shifts"])
        self.add("ReduceSum", ["rows_shifts", self.const([0])], ["token_shift"], keepdims=1)
        self.add("Add", ["token_shift", columns], ["positions"])

    def name(self, value: Value | None) -> str:
        """Return the node name of a value; "" for an absent input."""
        if value is None:
            return ""
        if value in self.graph.tables and value.dtype == "int64":
            return self.const(self.graph.tables[value])
        if value in self.graph.weights or value in self.graph.tables:
            return self.dense(value)
        return next((n for n, v in self.graph.inputs.items() if v is value), value.name)
