"""Fused graph → an OpenVINO model of one shape, over caches that lie end to end: for devices without paged attention.

All sizes are numbers: B rows, Q new tokens of each, a cache of S tokens (0: none, the first step of a sequence). The
cache is read only; what is new comes out, and whoever holds the cache writes it there. Operators are plain ones, which
every plugin has; between the attentions tokens are laid end to end (graph_model.py).

    inputs   token_ids [B, Q], past_lengths [B], new_lengths [B] int32 (1 … Q live tokens, right padded); where S > 0
             past_k0, past_v0, past_k1 … [B, kv_heads, S, head_dim] float32, of which row b's first past_lengths[b]
             tokens are read and the others may hold anything, NaN included
    outputs  logits [B, V] float32 after each row's last live token; with top_k also top_values [B, k] float32,
             descending, and top_ids [B, k], integers; new_k0, new_v0 … [B, kv_heads, Q, head_dim] float32

Row b's new token i sits at position past_lengths[b] + i, and sees what is before it within the layer's window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.targets.openvino.constants import Constants
from llmc.compiler.targets.openvino.formats import WeightFormat
from llmc.compiler.targets.openvino.graph_model import GraphModel, heads_of, model_of, parameter

STEP_INPUTS = ("token_ids", "past_lengths", "new_lengths")
UNSEEN = -65504.0
"""Score of a token that is not seen: float16's least number, so that devices that compute in float16 have it, too."""


def static_model(
    graph: Graph, weights: WeightFormat, batch: int, query: int, context: int, top_k: int = 0
) -> ov.Model:  # fmt: skip
    """The model of a fused `graph` for `batch` rows of `query` new tokens over a cache of `context` tokens.

    Its constants are declared in `weights.constants`. Raises CompileError naming an operator that has no form here.
    """
    return StaticModel(graph, weights, batch, query, context, top_k).model


def step_parameters(batch: int, query: int) -> dict[str, Any]:
    """STEP_INPUTS by name."""
    shapes = ((batch, query), (batch,), (batch,))
    return {name: parameter(name, shape, ov.Type.i32) for name, shape in zip(STEP_INPUTS, shapes, strict=True)}


class StaticModel(GraphModel):
    """Builds the model."""

    def __init__(
        self, graph: Graph, weights: WeightFormat, batch: int, query: int, context: int, top_k: int = 0
    ) -> None:  # fmt: skip
        super().__init__(graph, weights)
        self.sizes = batch, query, context
        self._new: list[tuple[str, Any]] = []
        step = step_parameters(batch, query)
        self._positions = Positions(self.constants, step["past_lengths"], self.sizes)
        outputs = self.lower(self._laid_out(step), top_k)
        self.model = model_of([*step.values(), *self.caches], [*outputs.items(), *self._new])

    def _laid_out(self, step: dict[str, Any]) -> dict[str, Any]:
        """The inputs that the operators know: B · Q tokens end to end."""
        (batch, query, _), small = self.sizes, self.constants.small
        positions = ops.reshape(self._positions.of_tokens, small([batch * query]), False)
        if self.graph.tables:  # padding may be beyond the last position
            last = min(len(table) for table in self.graph.tables.values()) - 1
            positions = ops.minimum(positions, small(last))
        begins = self.constants.table(f"begins_{batch}_{query}", np.arange(batch, dtype=np.int32) * query - 1)
        return {
            "input_ids": ops.reshape(step["token_ids"], small([batch * query]), False),
            "position_ids": positions,
            "rows": ops.add(step["new_lengths"], begins),
        }

    def _op_gqa(self, node: Node) -> list[Any]:
        heads, kv_heads, size = heads_of(node)
        query, key, value = self.qkv(node)
        key, value = self._headed(key, kv_heads, size), self._headed(value, kv_heads, size)
        layer = len(self._new) // 2
        self._new += [(f"new_k{layer}", key), (f"new_v{layer}", value)]
        return [self._attention_over(self._headed(query, heads, size), key, value, node, layer)]

    def _op_last_rows(self, node: Node) -> Any:
        return self.get(node.inputs[0]) if self.sizes[1] == 1 else super()._op_last_rows(node)

    def _headed(self, x: Any, heads: int, size: int) -> Any:
        """[B · Q, H · D] → [B, H, Q, D]."""
        (batch, query, _), small = self.sizes, self.constants.small
        if query == 1:
            return ops.reshape(x, small([batch, heads, 1, size]), False)
        return ops.transpose(ops.reshape(x, small([batch, query, heads, size]), False), small([0, 2, 1, 3]))

    def _attention_over(self, query: Any, key: Any, value: Any, node: Node, layer: int) -> Any:
        """[B · Q, Hq · D]: the query heads of a group are rows of one product with their key head."""
        (batch, length, context), small = self.sizes, self.constants.small
        heads, kv_heads, size = heads_of(node)
        groups, window, softcap = heads // kv_heads, int(node.attrs["window"]), float(node.attrs["softcap"])
        grouped = ops.reshape(query, small([batch, kv_heads, groups * length, size]), False)
        grouped = ops.multiply(grouped, small(node.attrs["scale"], np.float32))
        scores = ops.matmul(grouped, key, False, True)
        past_value = None
        if context:
            shape = (batch, kv_heads, context, size)
            past = [parameter(f"past_{what}{layer}", shape, ov.Type.f32) for what in "kv"]
            self.caches += past
            past_value = ops.select(self._positions.live, past[1], small(0, np.float32))  # 0 · NaN is NaN
            scores = ops.concat([ops.matmul(grouped, past[0], False, True), scores], -1)
        if softcap:
            cap = small(softcap, np.float32)
            scores = ops.multiply(ops.tanh(ops.divide(scores, cap)), cap)
        if slopes := node.attrs.get("slopes"):
            each = np.repeat(np.reshape(np.asarray(slopes, np.float32), (kv_heads, groups)), length, 1)
            by_row = small(each[None, :, :, None], np.float32)
            scores = ops.add(scores, ops.multiply(by_row, self._positions.of_keys))
        if table := node.optional(9):
            scores = ops.add(scores, self._by_place(table, kv_heads, groups))
        scores = ops.select(self._positions.seen(window, groups), scores, small(UNSEEN, np.float32))
        shares = self._shares(scores, node)
        if past_value is None:
            out = ops.matmul(shares, value, False, False)
        else:
            of_past, of_new = ops.variadic_split(shares, small(-1), small([context, length])).outputs()
            out = ops.add(ops.matmul(of_past, past_value, False, False), ops.matmul(of_new, value, False, False))
        if length > 1:
            out = ops.transpose(ops.reshape(out, small([batch, heads, length, size]), False), small([0, 2, 1, 3]))
        return ops.reshape(out, small([batch * length, heads * size]), False)

    def _by_place(self, table: Value, kv_heads: int, groups: int) -> Any:
        """What heads add at the positions of keys, by a table [Hq, P]: [B, Hkv, groups · Q, S + Q]."""
        (batch, length, context), small = self.sizes, self.constants.small
        places = ops.minimum(self._positions.of_keys, small(int(table.shape[1]) - 1, np.float32))
        places = ops.reshape(ops.convert(places, ov.Type.i32), small([batch, context + length]), False)
        added = ops.gather(self.get(table), places, small(1))  # [Hq, B, S + Q]
        added = ops.reshape(ops.transpose(added, small([1, 0, 2])), small([batch, kv_heads, groups, 1, -1]), False)
        added = ops.tile(added, small([1, 1, 1, length, 1]))
        return ops.reshape(added, small([batch, kv_heads, groups * length, context + length]), False)

    def _shares(self, scores: Any, node: Node) -> Any:
        """Softmax of scores [B, Hkv, groups · Q, S + Q], over which a head's sink takes its part, too."""
        (batch, length, context), small = self.sizes, self.constants.small
        sinks = self.sinks(node)
        if sinks is None:
            return ops.softmax(scores, -1)
        heads, kv_heads, _ = heads_of(node)
        groups = heads // kv_heads
        sinks = ops.tile(ops.reshape(sinks, small([1, kv_heads, groups, 1]), False), small([batch, 1, 1, length]))
        sinks = ops.reshape(sinks, small([batch, kv_heads, groups * length, 1]), False)
        shares = ops.softmax(ops.concat([scores, sinks], -1), -1)
        return ops.variadic_split(shares, small(-1), small([context + length, 1])).output(0)


class Positions:
    """Where tokens are, and which of them see each other: made once for all layers of a model."""

    def __init__(self, constants: Constants, past_lengths: Any, sizes: tuple[int, int, int]) -> None:
        self._constants = constants
        self._sizes = sizes
        self._masks: dict[tuple[int, int], Any] = {}
        batch, query, context = sizes
        past = ops.reshape(past_lengths, constants.small([batch, 1, 1, 1]), False)
        self.of_tokens = ops.add(past, self._table("new", np.arange(query).reshape(1, 1, query, 1)))
        """[B, 1, Q, 1]"""
        self.of_keys = ops.convert(
            ops.reshape(self.of_tokens, constants.small([batch, 1, 1, query]), False), ov.Type.f32
        )
        """[B, 1, 1, S + Q] float32: positions of the cache and of the new tokens."""
        if context:
            at = np.arange(context)
            self.live = ops.less(self._table("tokens", at.reshape(1, 1, context, 1)), past)
            """[B, 1, S, 1]: whether the cache has a token there."""
            self._places = self._table("places", at.reshape(1, 1, 1, context))
            self._there = ops.less(self._places, past)
            places = ops.broadcast(ops.convert(self._places, ov.Type.f32), constants.small([batch, 1, 1, context]))
            self.of_keys = ops.concat([places, self.of_keys], -1)

    def seen(self, window: int, groups: int) -> Any:
        """[B, 1, groups · Q, S + Q], or its broadcast: whether a new token sees a token of the cache, or a new one.

        `window`: a token sees so many, itself included; not positive: all before it.
        """
        if (window, groups) not in self._masks:
            self._masks[window, groups] = self._made(window, groups)
        return self._masks[window, groups]

    def _made(self, window: int, groups: int) -> Any:
        (batch, query, context), small = self._sizes, self._constants.small
        at = np.arange(query)
        ahead = at[:, None] - at
        new = (ahead >= 0) & (ahead < window) if window > 0 else ahead >= 0
        mask = ops.convert(
            self._table(f"causal_{window}", np.tile(new, (groups, 1)).reshape(1, 1, groups * query, query)),
            ov.Type.boolean,
        )
        if not context:
            return mask
        past = self._there
        if window > 0:
            first = ops.subtract(self.of_tokens, small(window))
            past = ops.logical_and(past, ops.greater(self._places, first))
            past = ops.tile(past, small([1, 1, groups, 1]))
        rows = groups * query
        past = ops.broadcast(past, small([batch, 1, rows, context]))
        return ops.concat([past, ops.broadcast(mask, small([batch, 1, rows, query]))], -1)

    def _table(self, name: str, values: NDArray[Any]) -> Any:
        shape = "x".join(map(str, values.shape))
        return self._constants.table(f"{name}_{shape}", values.astype(np.int32))
