"""Fused graph → one OpenVINO model with paged attention, for every shape of step.

The rows of a step are laid end to end: where the graph has [B, Q, …] the model has [T, …], T being all new tokens of
the step, and where it has [B, …] after `last_rows` it has [R, …], one for each row of logits that is asked for.

    inputs   input_ids, position_ids [T] int64; past_lens [B] int32, tokens of each row in the cache;
             subsequence_begins [B + 1] int32, where each row's tokens begin; block_indices int32, the blocks of all
             rows end to end, block_indices_begins [B + 1] int32; max_context_len [] int32; rows [R] int64, the tokens
             whose logits are wanted; key_cache.N, value_cache.N: [blocks, kv_heads, block, head_dim] in whatever
             precision and layout the device chooses
    outputs  logits [R, V] float32; with top_k also top_values [R, k] float32, descending, and top_ids [R, k] int64

Operator and inputs as in OpenVINO's PagedAttentionExtension; everything else is graph_model.py's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension

from llmc.compiler.program.ir import Graph, Node
from llmc.compiler.targets.openvino.formats import WeightFormat
from llmc.compiler.targets.openvino.graph_model import GraphModel, heads_of, model_of, output_of, parameter
from llmc.errors import CompileError

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


class PagedModel(GraphModel):
    """Builds the model of `graph`, of `tokens` tokens and `rows` rows of logits, None for any number: `model`."""

    def __init__(
        self, graph: Graph, weights: WeightFormat, *, tokens: int | None = None, rows: int | None = None, top_k: int = 0
    ) -> None:  # fmt: skip
        fixed = dict.fromkeys(PER_TOKEN, tokens) | dict.fromkeys(PER_ROW, rows)
        inputs = {name: parameter(name, [fixed.get(name) or d for d in shape], dtype) for name, shape, dtype in INPUTS}
        super().__init__(graph, weights)
        outputs = self.lower(inputs, top_k)
        self.model = model_of([*inputs.values(), *self.caches], outputs.items())

    def _op_gqa(self, node: Node) -> list[Any]:
        if node.attrs["softcap"]:
            raise CompileError("attention with softcap has no paged form in OpenVINO")
        if node.optional(9) is not None:
            raise CompileError("attention with a table of what positions add has no paged form in OpenVINO")
        heads, kv_heads, size = heads_of(node)
        layer = len(self.caches) // 2
        caches = [_cache(f"{what}_cache.{layer}", kv_heads, size) for what in ("key", "value")]
        self.caches += caches
        out = self._attention(*self.qkv(node), caches, node)
        _tell_heads(out, kv_heads, size)
        return [ops.reshape(out.output(0), self.constants.small([-1, heads * size]), False)]

    def _attention(self, query: Any, key: Any, value: Any, caches: list[Any], node: Node) -> Any:
        """Inputs in the order of OpenVINO 2026.4's PagedAttentionExtension; what is not used is empty or 0."""
        small, given = self.constants.small, self.inputs
        floats, ints, zero = small([], np.float32), small([], np.int32), small(0, np.int32)
        sinks = self.sinks(node)
        if sinks is None:
            sinks = small(np.zeros((0, 0, 0, 0)), np.float32)
        else:
            sinks = ops.reshape(sinks, small([1, -1, 1, 1]), False)
        window = max(0, int(node.attrs["window"]))
        arguments = [
            query, key, value, *caches, given["past_lens"], given["subsequence_begins"], given["block_indices"],
            given["block_indices_begins"], small(node.attrs["scale"], np.float32), small(window, np.int32),
            small(node.attrs.get("slopes", []), np.float32),
            given["max_context_len"], ints, ints, ints, floats, floats, zero, zero,
            sinks, zero, ints, ints, ints, ints, small([], np.uint8), ints,
        ]  # fmt: skip
        return _PagedAttentionExtension([output_of(a) for a in arguments])


def _cache(name: str, heads: int, size: int) -> Any:
    made = ops.parameter(ov.PartialShape([-1, -1, -1, -1]), ov.Type.dynamic, name=name)
    made.output(0).set_names({name})
    _tell_heads(made, heads, size)
    return made


def _tell_heads(node: Any, heads: int, size: int) -> None:
    info = node.get_rt_info()
    for name, number in (("num_k_heads", heads), ("k_head_size", size), ("num_v_heads", heads), ("v_head_size", size)):
        info[name] = number
