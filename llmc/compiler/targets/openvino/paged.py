"""Lowers the fused graph to one OpenVINO model with paged attention, for every shape of step.

The rows of a step are packed: where the graph has [B, Q, …] the model has [T, …], T being all new tokens of the step,
and where it has [B, …] after `last_rows` it has [R, …], one for each requested row of logits.

    inputs   input_ids, position_ids [T] int64; past_lens [B] int32, tokens of each row in the cache;
             subsequence_begins [B + 1] int32, where each row's tokens begin; block_indices int32, the packed blocks of
             all rows, block_indices_begins [B + 1] int32; max_context_len [] int32; rows [R] int64, the tokens
             whose logits are wanted; key_cache.N, value_cache.N: [blocks, kv_heads, block, head_dim] in whatever
             precision and layout the device chooses; of a model with adapters to choose from, adapters [T] int64
    outputs  logits [R, V] float32; with top_k also top_values [R, k] float32, descending, and top_ids [R, k] int64

    where layers have recurrent state (states.py)
    inputs   state_rows [2 · B] int32, the table rows that each row's state is read from and written to; state_begins
             [B + 1] int32: 0, 2, 4 …; state_interval [B] int32, more than a step's tokens; LAYOUT_state.N: the table of
             the N-th state, float32 (runtime/executors/openvino/states.py has the layouts)
    outputs  of layout "columns", which is not written in place: new_state.N [B, …]

    where attention has no paged form: its scores have a soft cap
    inputs   block_tables [B, M] int32, each row's blocks, followed by any others; its caches are float32 in the
             layout above, which are not written in place
    outputs  new_key.N, new_value.N [B, kv_heads, Q, head_dim] float32

    where layers have a window and a ring buffer of R tokens
    inputs   past_lens.R, block_indices.R, block_indices_begins.R, max_context_len.R, block_tables.R, step_sizes.R: the
             same of their caches, as if a row's tokens began with the first block that it still holds

    with an output of a cache, all rows of a step have one length
    inputs   step_sizes [3] int32: B, Q, and the tokens of M blocks

N counts pairs of keys and values, and recurrent states, in the order of the cache's shape.

Operator and inputs as in OpenVINO's PagedAttentionExtension; everything else is graph_model.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension

from llmc.compiler.checkpoint.adapter_layout import ADAPTERS
from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.targets.openvino.attention import attended, headed
from llmc.compiler.targets.openvino.formats import WeightFormat
from llmc.compiler.targets.openvino.graph_model import (
    GraphModel,
    caches_of,
    grows,
    heads_of,
    kept_of,
    model_of,
    output_of,
    parameter,
    value_width,
)
from llmc.compiler.targets.openvino.states import STATES, OneLength, OverBlocks
from llmc.errors import CompileError
from llmc.runtime.executors.openvino.blocks import of_ring

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
POOL = {
    "past_lens": (-1,), "block_indices": (-1,), "block_indices_begins": (-1,), "max_context_len": (),
    "block_tables": (-1, -1), "step_sizes": (3,),
}  # fmt: skip
"""Inputs that locate rows in a pool of blocks, and their shapes."""
PER_TOKEN = ("input_ids", "position_ids", ADAPTERS)
PER_ROW = ("rows",)
OF_STATES = ("state_rows", "state_begins", "state_interval")
KEY_VALUE = ("key", "value")


class PagedModel(GraphModel):
    """Builds `model` from `graph` for `tokens` tokens and `rows` rows of logits, None for any number.

    `wide`: values are as wide as keys in the cache (runtime/executors/openvino/blocks.py in u8). `rings`: the
    ring-buffer slots of each pair of keys and values, None where it holds all tokens.
    """

    def __init__(
        self, graph: Graph, weights: WeightFormat, *, tokens: int | None = None, rows: int | None = None,
        top_k: int = 0, wide: bool = False, rings: Sequence[int | None] = (),
    ) -> None:  # fmt: skip
        fixed = dict.fromkeys(PER_TOKEN, tokens) | dict.fromkeys(PER_ROW, rows)
        inputs = {name: parameter(name, [fixed.get(name) or d for d in shape], dtype) for name, shape, dtype in INPUTS}
        there: dict[Value, Any] = {}
        if ADAPTERS in graph.inputs:
            inputs[ADAPTERS] = there[graph.inputs[ADAPTERS]] = parameter(ADAPTERS, [tokens or -1], np.int64)
        super().__init__(graph, weights)
        self._wide = wide
        self._rings = rings
        self.plain: dict[str, tuple[int, str]] = {}
        """Operators that need rows of one length: number of layers, and why."""
        held = caches_of(graph)
        self._pairs = [v for v in held if grows(v)][::2]
        self._states = [v for v in held if not grows(v)]
        self._caches: dict[int, list[Any]] = {}
        self._more: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        self._one_length: OneLength | None = None
        self._over_blocks: dict[int | None, OverBlocks] = {}
        outputs = self.lower(inputs, top_k, there)
        given = [*inputs.values(), *self._more.values(), *self.caches]
        self.model = model_of(given, [*outputs.items(), *self._given.items()])

    def _op_gqa(self, node: Node) -> list[Any]:
        key = node.inputs[3]
        assert key is not None
        pair, why = self._pairs.index(key), _unpaged(node)
        if pair not in self._caches:  # some layers read the keys and values of earlier ones
            built = zip(KEY_VALUE, kept_of(node), strict=True)
            self._caches[pair] = [
                _cache(f"{what}_cache.{pair}", heads, size, bool(why)) for what, (heads, size) in built
            ]
            self.caches += self._caches[pair]
        if why:
            self.in_plain_operators("attention", why)
            return [self._in_plain_operators(node, pair)]
        (heads, kv_heads, size), width, small = heads_of(node), value_width(node), self.constants.small
        query, key, value = self.qkv(node)
        held = max(width, size) if self._wide else width
        if held > width:
            value = ops.reshape(value, small([-1, kv_heads, width]), False)
            value = ops.pad(value, small([0, 0, 0]), small([0, 0, held - width]), "constant", small(0, np.float32))
            value = ops.reshape(value, small([-1, kv_heads * held]), False)
        out = self._attention(query, key, value, pair, node)
        _report_heads(out, (kv_heads, size), (kv_heads, held))
        built = out.output(0)
        if held > width:
            built = ops.reshape(built, small([-1, heads, held]), False)
            built = ops.slice(built, small([0]), small([width]), small([1]), small([2]))
        return [ops.reshape(built, small([-1, heads * width]), False)]

    def _in_plain_operators(self, node: Node, pair: int) -> Any:
        ring = self._ring(pair)
        if ring is not None and node.optional(9) is not None:
            raise CompileError(
                f"a table of position biases has no form over a ring buffer of {ring} tokens (at {node.out})"
            )
        if ring not in self._over_blocks:
            sizes, past, tables = (self._of_pool(name, ring) for name in ("step_sizes", "past_lens", "block_tables"))
            self._over_blocks[ring] = OverBlocks(self.constants, sizes, past, tables)
        rows = self._over_blocks[ring]
        query, *built = self.qkv(node)
        kept = list(zip(self._caches[pair], built, kept_of(node), strict=True))
        new = [headed(self, rows, x, heads, size) for _, x, (heads, size) in kept]
        for what, x in zip(KEY_VALUE, new, strict=True):
            self._given.setdefault(f"new_{what}.{pair}", x)
        past = [rows.cached(cache, heads, size) for cache, _, (heads, size) in kept]
        return attended(self, rows, node, query, new, past)

    def in_plain_operators(self, what: str, why: str) -> None:
        """Count a layer that runs in plain operators."""
        self.plain[what] = self.plain.get(what, (0, ""))[0] + 1, why

    def _op_causal_conv(self, node: Node) -> list[Any]:
        return STATES["causal_conv"](self, node)

    def _op_gated_delta(self, node: Node) -> list[Any]:
        return STATES["gated_delta"](self, node)

    def _op_state_scan(self, node: Node) -> list[Any]:
        return STATES["state_scan"](self, node)

    def state_table(self, layout: str, state: Value | None, shape: list[int]) -> Any:
        """Return the input for a state's table, `shape` in a row."""
        assert state is not None
        built = parameter(f"{layout}_state.{self._states.index(state)}", [-1, *shape], ov.Type.f32)
        self.caches.append(built)
        return built

    def step_of_states(self) -> list[Any]:
        """Return the step inputs that follow a table in OpenVINO's operators."""
        rows, begins, interval = (self._input(name, [-1]) for name in OF_STATES)
        return [self.inputs["subsequence_begins"], rows, begins, self.inputs["past_lens"], interval]

    def rows_read(self) -> Any:
        """Return each row's row in a state table, [B]."""
        small = self.constants.small
        pairs = ops.reshape(self._input("state_rows", [-1]), small([-1, 2]), False)
        return ops.gather(pairs, small(0), small(1))

    def give(self, state: Value, new: Any) -> None:
        """Add the output for a state that is not written in place."""
        self._given[f"new_state.{self._states.index(state)}"] = new

    def rows_of_one_length(self) -> OneLength:
        """Return the step's rows as rows of one length."""
        if self._one_length is None:
            self._one_length = OneLength(self.constants, self._of_pool("step_sizes", None))
        return self._one_length

    def _ring(self, pair: int) -> int | None:
        return self._rings[pair] if self._rings else None

    def _of_pool(self, name: str, ring: int | None) -> Any:
        """An input that locates rows in ring-buffer caches, or in those of all tokens."""
        if ring is None and name in self.inputs:
            return self.inputs[name]
        return self._input(of_ring(name, ring), list(POOL[name]))

    def _input(self, name: str, shape: list[int]) -> Any:
        """An input that only some models have."""
        if name not in self._more:
            self._more[name] = parameter(name, shape, np.int32)
        return self._more[name]

    def _attention(self, query: Any, key: Any, value: Any, pair: int, node: Node) -> Any:
        """Inputs in the order of OpenVINO 2026.4's PagedAttentionExtension; unused ones are empty or 0."""
        small, ring, caches = self.constants.small, self._ring(pair), self._caches[pair]
        past, blocks, begins, longest = (self._of_pool(name, ring) for name in list(POOL)[:4])
        floats, ints, zero = small([], np.float32), small([], np.int32), small(0, np.int32)
        sinks = self.sinks(node)
        if sinks is None:
            sinks = small(np.zeros((0, 0, 0, 0)), np.float32)
        else:
            sinks = ops.reshape(sinks, small([1, -1, 1, 1]), False)
        window = max(0, int(node.attrs["window"]))
        arguments = [
            query, key, value, *caches, past, self.inputs["subsequence_begins"], blocks, begins,
            small(node.attrs["scale"], np.float32), small(window, np.int32),
            small(node.attrs.get("slopes", []), np.float32), longest, ints, ints, ints, floats, floats, zero, zero,
            sinks, zero, ints, ints, ints, ints, small([], np.uint8), ints,
        ]  # fmt: skip
        return _PagedAttentionExtension([output_of(a) for a in arguments])


def _unpaged(node: Node) -> str:
    """Why an attention has no paged form, or ""."""
    if node.attrs["softcap"]:
        return "scores with a soft cap have no paged form"
    if node.optional(9) is not None:
        return "scores with a table of position biases have no paged form"
    return ""


def _cache(name: str, heads: int, size: int, plain: bool) -> Any:
    """A paged cache in the device's layout, or in that of plain operators."""
    if plain:
        return parameter(name, [-1, heads, -1, size], ov.Type.f32)
    built = ops.parameter(ov.PartialShape([-1, -1, -1, -1]), ov.Type.dynamic, name=name)
    built.output(0).set_names({name})
    _report_heads(built, (heads, size), (heads, size))
    return built


def _report_heads(node: Any, key: tuple[int, int], value: tuple[int, int]) -> None:
    info = node.get_rt_info()
    reported = {"num_k_heads": key[0], "k_head_size": key[1], "num_v_heads": value[0], "v_head_size": value[1]}
    for name, number in reported.items():
        info[name] = number
