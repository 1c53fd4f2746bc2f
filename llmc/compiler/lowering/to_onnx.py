"""Fused graph → ONNX with ONNX Runtime's operators, weights outside.

One model with symbolic B, Q and S covers every bucket; `bind` fixes some of them for one bucket. Its inputs and
outputs are the program contract's (frontend/trace.py), caches being updated in place when past and present are bound
to one buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from llmc.compiler.lowering.ir import Graph, Node, Value
from llmc.compiler.lowering.recipes import Recipe
from llmc.errors import CompileError

MICROSOFT = "com.microsoft"
OPSET, IR_VERSION = 21, 10
_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32}
_UNPLACED = "weights"
_BLOCKS = (256, 128, 64, 32, 16)
NORMED_BLOCK = 32


@dataclass(frozen=True)
class OnnxOptions:
    """`block` quantises every matrix to 8 bits, in blocks of at most so many inputs; 0 keeps float32.

    Blocks of matrices that read a normalised hidden state are at most NORMED_BLOCK: kernels quantise activations by the
    same blocks, and outlier channels of the hidden state cost most there (benchmarks/RESULTS.md).
    """

    block: int

    def block_for(self, width: int, normed: bool = False) -> int:
        """Block for a matrix of `width` inputs: the largest power of two that is allowed and needs no padding."""
        most = min(self.block, NORMED_BLOCK) if normed else self.block
        return next((b for b in _BLOCKS if b <= most and width % b == 0), min(most, 32))


@dataclass
class Lowered:
    """An ONNX model without weights, the recipes of its tensors, and its computed tables."""

    model: ModelProto
    recipes: list[Recipe]
    tables: dict[str, NDArray[np.float32]]


def lower(graph: Graph, options: OnnxOptions) -> Lowered:
    """Emit `graph`; raises CompileError naming an operator that has no ONNX form here."""
    return _Emitter(graph, options).run()


class _Emitter:
    def __init__(self, graph: Graph, options: OnnxOptions) -> None:
        self.graph = graph
        self.options = options
        self.nodes: list[Any] = []
        self.initializers: dict[str, TensorProto] = {}
        self.recipes: list[Recipe] = []
        self.shared: dict[str, str] = {}
        self.normed: set[Value | None] = set()

    def run(self) -> Lowered:
        inputs = [self._info(v, name) for name, v in self.graph.inputs.items()]
        for node in self.graph.nodes:
            emit = getattr(self, "_add_" if node.op == "add" else f"_{node.op}", None)
            if emit is None:
                raise CompileError(f"operator {node.op!r} has no ONNX lowering (at {node.out})")
            emit(node)
        outputs = []
        for name, v in self.graph.outputs:
            self._rename(v.name, name)
            outputs.append(self._info(v, name))
        model = helper.make_model(
            helper.make_graph(self.nodes, "llmc", inputs, outputs, list(self.initializers.values())),
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
            ir_version=IR_VERSION, producer_name="llmc",
        )  # fmt: skip
        short = _shorten(model)
        recipes = [replace(r, name=short[r.name]) for r in self.recipes]
        tables = {short[v.name]: t for v, t in self.graph.tables.items() if v.name in self.initializers}
        return Lowered(model, recipes, tables)

    def _info(self, value: Value, name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, _TYPES[value.dtype], list(value.shape))

    def _rename(self, old: str, new: str) -> None:
        for node in self.nodes:
            for field in (node.input, node.output):
                for i, name in enumerate(field):
                    if name == old:
                        field[i] = new

    def _add(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attrs))
        return outputs[0]

    def _const(self, values: Any, dtype: type = np.int64) -> str:
        array: NDArray[Any] = np.asarray(values, dtype)
        name = f"const_{dtype.__name__}_{'_'.join(map(str, array.ravel().tolist()))}_{array.ndim}"
        if name not in self.initializers:
            self.initializers[name] = helper.make_tensor(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.tobytes(), raw=True
            )
        return name

    def _external(self, recipe: Recipe, dtype: int, shape: tuple[int, ...]) -> str:
        """Declare a tensor that lies in the weights file."""
        if recipe.name not in self.initializers:
            tensor = TensorProto(name=recipe.name, data_type=dtype, data_location=TensorProto.EXTERNAL)
            tensor.dims.extend(shape)
            tensor.external_data.add(key="location", value=_UNPLACED)
            self.initializers[recipe.name] = tensor
            self.recipes.append(recipe)
        return recipe.name

    def _dense(self, value: Value) -> str:
        shape = tuple(int(d) for d in value.shape)
        if value in self.graph.tables:
            return self._external(Recipe(value.name, "table", ()), TensorProto.FLOAT, shape)
        name = self.graph.weights[value]
        return self._external(Recipe(name, "dense", (name,)), TensorProto.FLOAT, shape)

    def _name(self, value: Value | None) -> str:
        if value is None:
            return ""
        if value in self.graph.weights or value in self.graph.tables:
            return self._dense(value)
        return next((n for n, v in self.graph.inputs.items() if v is value), value.name)

    # ---- operators ----

    def _embedding(self, node: Node) -> None:
        weight, ids = node.inputs[0], self._name(node.inputs[1])
        assert weight is not None
        rows, width = (int(d) for d in weight.shape)
        block = self.options.block_for(width, normed=True)  # the head's, which it is tied to
        if not self.options.block or width % block:
            self._add("Gather", [self._name(weight), ids], [node.out.name])
            return
        data, scales = self._quantised([self.graph.weights[weight]], rows, width, block, as_rows=True)
        self._add(
            "GatherBlockQuantized", [data, ids, scales], [node.out.name], MICROSOFT,
            bits=8, block_size=block, gather_axis=0, quantize_axis=1,
        )  # fmt: skip

    def _quantised(
        self, sources: list[str], rows: int, width: int, block: int, as_rows: bool = False
    ) -> tuple[str, str]:
        blocks = -(-width // block)
        stem = "+".join(sources)
        if as_rows:
            recipe = Recipe(f"{stem}.q8_rows", "q8_rows", tuple(sources), block)
            data = self._external(recipe, TensorProto.UINT8, (rows, blocks * block))
        else:
            recipe = Recipe(f"{stem}.q8", "q8_data", tuple(sources), block)
            data = self._external(recipe, TensorProto.UINT8, (rows, blocks, block))
        recipe = Recipe(f"{stem}.scales", "q8_scales", tuple(sources), block)
        return data, self._external(recipe, TensorProto.FLOAT, (rows, blocks))

    def _linear(self, node: Node) -> None:
        count = len(node.attrs.get("parts", [0]))
        weights = [v for v in node.inputs[1 : 1 + count] if v is not None]
        biases = [v for v in node.inputs[1 + count :] if v is not None]
        sources = [self.graph.weights[w] for w in weights]
        rows, width = sum(int(w.shape[0]) for w in weights), int(weights[0].shape[1])
        x = self._name(node.inputs[0])
        out = f"{node.out.name}_product" if biases else node.out.name
        if self.options.block:
            block = self.options.block_for(width, node.inputs[0] in self.normed)
            data, scales = self._quantised(sources, rows, width, block)
            self._add(
                "MatMulNBits", [x, data, scales], [out], MICROSOFT,
                K=width, N=rows, bits=8, block_size=block, accuracy_level=4,
            )  # fmt: skip
        elif len(node.out.shape) == 2 and count == 1:
            self._add("Gemm", [x, self._dense(weights[0])], [out], transB=1)  # the head: one copy with the embedding
        else:
            recipe = Recipe("+".join(sources) + ".T", "transposed", tuple(sources))
            self._add("MatMul", [x, self._external(recipe, TensorProto.FLOAT, (width, rows))], [out])
        if biases:
            names = [self.graph.weights[b] for b in biases]
            bias = self._external(Recipe("+".join(names), "dense", tuple(names)), TensorProto.FLOAT, (rows,))
            self._add("Add", [out, bias], [node.out.name])

    def _rms_norm(self, node: Node) -> None:
        self.normed.add(node.out)
        self._add(
            "SimplifiedLayerNormalization", [self._name(v) for v in node.inputs], [node.out.name],
            axis=-1, epsilon=node.attrs["eps"], stash_type=1,
        )  # fmt: skip

    def _skip_rms_norm(self, node: Node) -> None:
        self.normed.add(node.out)
        outputs = [node.outputs[0].name, "", "", node.outputs[1].name]
        self._add(
            "SkipSimplifiedLayerNormalization", [self._name(v) for v in node.inputs], outputs, MICROSOFT,
            epsilon=node.attrs["eps"],
        )  # fmt: skip

    def _gqa(self, node: Node) -> None:
        seqlens, total = self._lengths()
        q, k, v, past_k, past_v, _, cos, sin = (self._name(x) for x in node.inputs)
        self._add(
            "GroupQueryAttention", [q, k, v, past_k, past_v, seqlens, total, cos, sin],
            [o.name for o in node.outputs], MICROSOFT,
            num_heads=node.attrs["heads"], kv_num_heads=node.attrs["kv_heads"], scale=node.attrs["scale"],
            do_rotary=int(bool(cos)), rotary_interleaved=0, local_window_size=node.attrs["window"],
            softcap=node.attrs["softcap"],
        )  # fmt: skip

    def _lengths(self) -> tuple[str, str]:
        """seqlens_k [B] (index of the last key of each row, pad tokens counted) and the largest total length."""
        if "seqlens" not in self.shared:
            self.shared["seqlens"] = "seqlens_k"
            self._add("Shape", ["token_ids"], ["query_length"], start=1, end=2)
            self._add("Add", ["past_lengths", "query_length"], ["total_lengths"])
            self._add("Sub", ["total_lengths", self._const([1])], ["last_positions"])
            self._add("Cast", ["last_positions"], ["seqlens_k"], to=TensorProto.INT32)
            self._add("ReduceMax", ["total_lengths"], ["longest"], keepdims=0)
            self._add("Cast", ["longest"], ["total_length"], to=TensorProto.INT32)
        return "seqlens_k", "total_length"

    def _last_rows(self, node: Node) -> None:
        hidden, lengths = (self._name(v) for v in node.inputs)
        if "last_live" not in self.shared:
            self.shared["last_live"] = "last_live_index"
            self._add("Sub", [lengths, self._const([1])], ["last_live"])
            self._add("Unsqueeze", ["last_live", self._const([1])], ["last_live_index"])
        self._add("GatherND", [hidden, "last_live_index"], [node.out.name], batch_dims=1)

    def _silu(self, node: Node) -> None:
        self._add("QuickGelu", [self._name(node.inputs[0])], [node.out.name], MICROSOFT, alpha=1.0)

    def _split(self, node: Node) -> None:
        parts = self._const(node.attrs["parts"])
        self._add("Split", [self._name(node.inputs[0]), parts], [o.name for o in node.outputs], axis=-1)

    def _reshape(self, node: Node) -> None:
        source = node.inputs[0]
        assert source is not None
        shape = [0 if i < len(source.shape) and d == source.shape[i] else d for i, d in enumerate(node.out.shape)]
        unknown = [i for i, d in enumerate(shape) if isinstance(d, str)]
        if len(unknown) > 1:
            raise CompileError(f"reshape of {source} to {node.out.shape} has more than one unknown dimension")
        target = [-1 if isinstance(d, str) else d for d in shape]
        self._add("Reshape", [self._name(source), self._const(target)], [node.out.name])

    _view = _reshape

    def _binary(self, op: str, node: Node) -> None:
        operands = [self._name(v) for v in node.inputs]
        if "other" in node.attrs:
            operands.append(self._const(node.attrs["other"], np.float32))
        self._add(op, operands, [node.out.name])

    def _mul(self, node: Node) -> None:
        self._binary("Mul", node)

    def _add_(self, node: Node) -> None:
        self._binary("Add", node)


def _shorten(model: ModelProto) -> dict[str, str]:
    """Rename everything inside the graph to a few characters; returns old name → new name.

    ONNX Runtime keeps every name several times in every session, and strings of up to 15 characters cost it no
    allocation: 5% of the memory of an open executable. Inputs and outputs keep their names.
    """
    kept = {info.name for info in (*model.graph.input, *model.graph.output)} | {""}
    names: dict[str, str] = {}

    def short(name: str) -> str:
        return name if name in kept else names.setdefault(name, f"t{len(names)}")

    for node in model.graph.node:
        node.ClearField("name")
        for field in (node.input, node.output):
            for i, name in enumerate(field):
                field[i] = short(name)
    for tensor in model.graph.initializer:
        tensor.name = short(tensor.name)
    return names


def add_top(model: ModelProto, k: int) -> ModelProto:
    """Copy of `model` that also returns the `k` largest logits, descending, and their ids, both [B, k]; none for 0.

    TopK puts the lower index first where values are equal, as the operator's specification says.
    """
    topped = ModelProto()
    topped.CopyFrom(model)
    if not k:
        return topped
    graph = topped.graph
    rows = next(o for o in graph.output if o.name == "logits").type.tensor_type.shape.dim[0].dim_param
    graph.initializer.append(helper.make_tensor("top_k", TensorProto.INT64, [1], [k]))
    graph.node.append(helper.make_node("TopK", ["logits", "top_k"], ["top_values", "top_ids"], axis=-1))
    for at, (name, dtype) in enumerate((("top_values", TensorProto.FLOAT), ("top_ids", TensorProto.INT64)), 1):
        graph.output.insert(at, helper.make_tensor_value_info(name, dtype, [rows, k]))
    return topped


def bind(model: ModelProto, dims: Mapping[str, int]) -> ModelProto:
    """Copy of `model` with the named symbolic dimensions of inputs and outputs fixed."""
    bound = ModelProto()
    bound.CopyFrom(model)
    for info in (*bound.graph.input, *bound.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]
    return bound


def load_model(data: bytes) -> ModelProto:
    """An ONNX model from its bytes."""
    return ModelProto.FromString(data)


def place(model: ModelProto, location: str, placements: Mapping[str, Mapping[str, Any]]) -> ModelProto:
    """Copy of `model` whose tensors point at their place in the weights file named `location`.

    A placement has offset and length in bytes, and any other external-data entries the runtime knows, as strings.
    """
    placed = ModelProto()
    placed.CopyFrom(model)
    for tensor in placed.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            del tensor.external_data[:]
            for key, value in (("location", location), *placements[tensor.name].items()):
                tensor.external_data.add(key=key, value=str(value))
    return placed
