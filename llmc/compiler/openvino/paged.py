"""Fused graph → one OpenVINO model with paged attention, for every shape of step.

The rows of a step are laid end to end: where the graph has [B, Q, …] the model has [T, …], T being all new tokens of
the step, and where it has [B, …] after `last_rows` it has [R, …], one for each row of logits that is asked for.

    inputs   input_ids, position_ids [T] int64; past_lens [B] int32, tokens of each row in the cache;
             subsequence_begins [B + 1] int32, where each row's tokens begin; block_indices int32, the blocks of all
             rows end to end, block_indices_begins [B + 1] int32; max_context_len [] int32; rows [R] int64, the tokens
             whose logits are wanted; key_cache.N, value_cache.N: [blocks, kv_heads, block, head_dim] in whatever
             precision and layout the device chooses
    outputs  logits [R, V] float32; with top_k also top_values [R, k] float32, descending, and top_ids [R, k] int64

Operator and inputs as in OpenVINO's PagedAttentionExtension; rotary embedding and RMS norm are written as its plugins
fuse them. Which weights are compressed, and how, is the format's business (formats.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino import opset15
from openvino.op import _PagedAttentionExtension

from llmc.compiler.lowering.ir import Graph, Node, Value
from llmc.compiler.openvino.formats import WeightFormat
from llmc.errors import CompileError

_INT32_MAX = 2**31 - 1
INPUTS: tuple[tuple[str, tuple[int, ...], Any], ...] = (
    ("input_ids", (-1,), np.int64),
    ("position_ids", (-1,), np.int64),
    ("past_lens", (-1,), np.int32),
    ("subsequence_begins", (-1,), np.int32),
    ("block_indices", (-1,), np.int32),
    ("block_indices_begins", (-1,), np.int32),
    ("max_context_len", (), np.int32),
    ("rows", (-1,), np.int64),
)
PER_TOKEN = ("input_ids", "position_ids")
PER_ROW = ("rows",)


class PagedModel:
    """Builds the model of `graph`; `model` and `constants` are the result.

    Raises CompileError naming an operator that has no form here.
    """

    def __init__(
        self, graph: Graph, weights: WeightFormat, *, tokens: int | None = None, rows: int | None = None, top_k: int = 0
    ) -> None:  # fmt: skip
        self.graph = graph
        self.constants = weights.constants
        self.weights = weights
        self._made: dict[Value, Any] = {}
        fixed = dict.fromkeys(PER_TOKEN, tokens) | dict.fromkeys(PER_ROW, rows)
        self._inputs = {
            name: _parameter(name, tuple(fixed.get(name) or d for d in shape), dtype) for name, shape, dtype in INPUTS
        }
        self._caches: list[Any] = []
        self._rotary: dict[Value, Any] = {}
        for node in graph.nodes:
            emit = getattr(self, f"_op_{node.op}", None)
            if emit is None:
                raise CompileError(f"operator {node.op!r} has no OpenVINO lowering (at {node.out})")
            made = emit(node)
            for value, output in zip(node.outputs, made if isinstance(made, list) else [made], strict=False):
                self._made[value] = output
        outputs = {graph.outputs[0][0]: _output(self._get(graph.outputs[0][1]))}
        if top_k:
            outputs |= self._top(outputs["logits"], top_k)
        for name, value in outputs.items():
            value.set_names({name})
        results = [ops.result(value) for value in outputs.values()]
        self.model = ov.Model(results, [*self._inputs.values(), *self._caches], "llmc")

    def _top(self, logits: Any, k: int) -> dict[str, Any]:
        """The k largest logits, descending, and their ids; of equal ones the lower id first, which `stable` means."""
        top = opset15.topk(
            logits, self.constants.small(k), -1, "max", "value", index_element_type="i64", stable=True
        )  # fmt: skip
        return {"top_values": top.output(0), "top_ids": top.output(1)}

    def _get(self, value: Value | None) -> Any:
        assert value is not None
        if value in self._made:
            return self._made[value]
        if value in self.graph.weights:
            shape = tuple(int(d) for d in value.shape)
            return self.weights.vector(self.graph.weights[value], shape)
        raise CompileError(f"{value} has no value in a paged model")

    def _op_embedding(self, node: Node) -> Any:
        weight = node.inputs[0]
        assert weight is not None
        matrix = self.weights.matrix([self.graph.weights[weight]], [_shape(weight)], looked_up=True)
        return ops.gather(matrix, self._inputs["input_ids"], self.constants.small(0))

    def _op_linear(self, node: Node) -> Any:
        count = len(node.attrs.get("parts", [0]))
        matrices = [v for v in node.inputs[1 : 1 + count] if v is not None]
        biases = [v for v in node.inputs[1 + count :] if v is not None]
        weight = self.weights.matrix([self.graph.weights[w] for w in matrices], [_shape(w) for w in matrices])
        out = ops.matmul(self._get(node.inputs[0]), weight, False, True)
        if biases:
            out = ops.add(
                out, self.weights.concatenated([self.graph.weights[b] for b in biases], [_shape(b) for b in biases])
            )
        return out

    def _op_rms_norm(self, node: Node) -> Any:
        return self._norm(self._get(node.inputs[0]), node.inputs[1], node.attrs["eps"])

    def _op_skip_rms_norm(self, node: Node) -> list[Any]:
        total = ops.add(self._get(node.inputs[0]), self._get(node.inputs[1]))
        return [self._norm(total, node.inputs[2], node.attrs["eps"]), total]

    def _norm(self, x: Any, weight: Value | None, eps: float) -> Any:
        small = self.constants.small
        mean = ops.reduce_mean(ops.power(x, small(2, np.float32)), small([-1]), True)
        root = ops.divide(small(1, np.float32), ops.sqrt(ops.add(mean, small(eps, np.float32))))
        return ops.multiply(self._get(weight), ops.multiply(x, root))

    def _op_split(self, node: Node) -> list[Any]:
        return self._split(self._get(node.inputs[0]), node.attrs["parts"])

    def _split(self, x: Any, parts: list[int]) -> list[Any]:
        small = self.constants.small
        return list(ops.variadic_split(x, small(-1), small(parts)).outputs())

    def _op_gqa(self, node: Node) -> list[Any]:
        q, k, v, _, _, _, cos, sin = node.inputs
        heads, kv_heads, size = (int(node.attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
        if node.attrs["softcap"]:
            raise CompileError("attention with softcap has no paged form in OpenVINO")
        if k is None:
            query, key, value = self._split(self._get(q), [heads * size, kv_heads * size, kv_heads * size])
        else:
            query, key, value = (self._get(x) for x in (q, k, v))
        if cos is not None:
            query, key = (self._turned(x, n, size, cos, sin) for x, n in ((query, heads), (key, kv_heads)))
        layer = len(self._caches) // 2
        caches = [_cache(f"{what}_cache.{layer}", kv_heads, size) for what in ("key", "value")]
        self._caches += caches
        out = self._attention(query, key, value, caches, node)
        _tell_heads(out, kv_heads, size)
        return [ops.reshape(out.output(0), self.constants.small([-1, heads * size]), False)]

    def _attention(self, query: Any, key: Any, value: Any, caches: list[Any], node: Node) -> Any:
        """Inputs in the order of OpenVINO 2026.4's PagedAttentionExtension; what is not used is empty or 0."""
        small, given = self.constants.small, self._inputs
        floats, ints, zero = small([], np.float32), small([], np.int32), small(0, np.int32)
        window = max(0, int(node.attrs["window"]))
        arguments = [
            query, key, value, *caches, given["past_lens"], given["subsequence_begins"], given["block_indices"],
            given["block_indices_begins"], small(node.attrs["scale"], np.float32), small(window, np.int32), floats,
            given["max_context_len"], ints, ints, ints, floats, floats, zero, zero,
            small(np.zeros((0, 0, 0, 0)), np.float32), zero, ints, ints, ints, ints, small([], np.uint8), ints,
        ]  # fmt: skip
        return _PagedAttentionExtension([_output(a) for a in arguments])

    def _turned(self, x: Any, heads: int, size: int, cos: Value | None, sin: Value | None) -> Any:
        """Rotary embedding of [T, H·D], the two halves of a head turned against each other."""
        small = self.constants.small
        x = ops.transpose(ops.reshape(x, small([-1, 1, heads, size]), False), small([0, 2, 1, 3]))
        low = ops.slice(x, small([0]), small([size // 2]), small([1]), small([3]))
        high = ops.slice(x, small([size // 2]), small([_INT32_MAX]), small([1]), small([3]))
        turned = ops.concat([ops.multiply(high, small(-1, np.float32)), low], -1)
        x = ops.add(ops.multiply(x, self._angles(cos, size)), ops.multiply(turned, self._angles(sin, size)))
        return ops.reshape(ops.transpose(x, small([0, 2, 1, 3])), small([-1, heads * size]), False)

    def _angles(self, table: Value | None, size: int) -> Any:
        """cos or sin of each token's position, [T, 1, 1, D], from a table [P, D/2]."""
        assert table is not None
        if table not in self._rotary:
            small = self.constants.small
            half = ops.gather(
                self.constants.table(table.name, self.graph.tables[table]), self._inputs["position_ids"], small(0)
            )
            self._rotary[table] = ops.reshape(ops.concat([half, half], -1), small([-1, 1, 1, size]), False)
        return self._rotary[table]

    def _op_last_rows(self, node: Node) -> Any:
        return ops.gather(self._get(node.inputs[0]), self._inputs["rows"], self.constants.small(0))

    def _op_silu(self, node: Node) -> Any:
        return ops.swish(self._get(node.inputs[0]), self.constants.small(1, np.float32))

    def _op_reshape(self, node: Node) -> Any:
        shape = node.out.shape
        tail = [int(d) for d in (shape[2:] if shape[:2] == ("B", "Q") else shape[1:])]
        return ops.reshape(self._get(node.inputs[0]), self.constants.small([-1, *tail]), False)

    _op_view = _op_reshape

    def _op_mul(self, node: Node) -> Any:
        return ops.multiply(*self._operands(node))

    def _op_add(self, node: Node) -> Any:
        return ops.add(*self._operands(node))

    def _operands(self, node: Node) -> list[Any]:
        operands = [self._get(v) for v in node.inputs]
        if "other" in node.attrs:
            operands.append(self.constants.small(node.attrs["other"], np.float32))
        return operands


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(int(d) for d in value.shape)


def _output(node: Any) -> Any:
    return node.output(0) if hasattr(node, "output") else node


def _parameter(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    made = ops.parameter(list(shape), dtype, name=name)
    made.output(0).set_names({name})
    return made


def _cache(name: str, heads: int, size: int) -> Any:
    made = ops.parameter(ov.PartialShape([-1, -1, -1, -1]), ov.Type.dynamic, name=name)
    made.output(0).set_names({name})
    _tell_heads(made, heads, size)
    return made


def _tell_heads(node: Any, heads: int, size: int) -> None:
    info = node.get_rt_info()
    for name, number in (("num_k_heads", heads), ("k_head_size", size), ("num_v_heads", heads), ("v_head_size", size)):
        info[name] = number
