"""Lowers the fused graph to one OpenVINO model with paged attention, for every shape of step.

The rows of a step are packed: where the graph has [B, Q, …] the model has [T, …], T being all new tokens of the step,
and where it has [B, …] after `last_rows` it has [R, …], one for each requested row of logits.

    inputs   input_ids, position_ids [T] int64; past_lens [B] int32, tokens of each row in the cache;
             subsequence_begins [B + 1] int32, where each row's tokens begin; block_indices int32, the packed blocks of
             all rows, block_indices_begins [B + 1] int32; max_context_len [] int32; rows [R] int64, the tokens
             whose logits are wanted; key_cache.N, value_cache.N: [blocks, kv_heads, block, head_dim] in whatever
             precision and layout the device chooses; of a model with adapters to choose from, adapters [T] int64
    outputs  logits [R, V] float32; with top_k also top_values [R, k] float32, descending, and top_ids [R, k] int64

    where layers have recurrent state
    inputs   state_rows [2 · B] int32, the table rows that each row's state is read from and written to; state_begins
             [B + 1] int32: 0, 2, 4 …; state_interval [B] int32, more than a step's tokens; LAYOUT_state.N: the table of
             the N-th state, float32 (runtime/executors/openvino/paged_cache.py has the layouts)
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

Layers with recurrent state (frontend/recurrent.py) are OpenVINO operators over state tables. A table holds
one state a row. The runtime gives rows without a past a row of zeros to read. The operators take rows of any lengths
and write the tables in place (openvino/op/paged_causal_conv1d.hpp, paged_gated_delta_net.hpp and
paged_selective_ssm.hpp of OpenVINO 2026.4). Its Python package lacks them, so they are written by name and read back.
No such operator exists where each column of a state decays at its own rate (Mamba's first form). There a loop takes
token after token in all rows at once, which must have one length, and new states are outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension

from llmc.compiler.checkpoint.adapter_layout import ADAPTERS
from llmc.compiler.frontend.chunked import NORM_EPS
from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.targets.openvino.formats import Constants, WeightFormat
from llmc.compiler.targets.openvino.graph_model import (
    GraphModel,
    TokenRows,
    caches_of,
    grows,
    heads_of,
    kept_of,
    model_of,
    output_of,
    parameter,
    value_width,
)
from llmc.errors import CompileError
from llmc.runtime.executors.openvino.blocks import of_ring


class OneLength:
    """Rows of one length, whose sizes are the input `sizes` [3] int32: B, Q, and S, the token capacity of rows' blocks.

    The sizes are an input because OpenVINO 2026.4 exports a ShapeOf without its type, and reads it back with another
    one.
    """

    single = False

    def __init__(self, constants: Constants, sizes: Any) -> None:
        self.constants = constants
        self.batch, self.query, self.context = ops.split(sizes, constants.small(0), 3).outputs()

    def shape(self, *sizes: int | str) -> Any:
        known, small = {"B": self.batch, "Q": self.query}, self.constants.small
        return ops.concat([known[size] if isinstance(size, str) else small([size]) for size in sizes], 0)

    def _range(self, size: Any) -> Any:
        small = self.constants.small
        return ops.range(small(0), ops.squeeze(size, small([0])), small(1), "i32")


class OverBlocks(OneLength, TokenRows):
    """Rows of one length over a block cache [blocks, H, block, D].

    `past` [B] int32 counts each row's cached tokens; `tables` [B, M] int32 has each row's blocks, followed by any
    others.
    """

    def __init__(self, constants: Constants, sizes: Any, past: Any, tables: Any) -> None:
        TokenRows.__init__(self, constants)
        OneLength.__init__(self, constants, sizes)
        self._tables = tables
        small = constants.small
        start = ops.reshape(past, small([-1, 1, 1, 1]), False)
        at = ops.reshape(self._range(self.context), small([1, 1, 1, -1]), False)
        new = self._range(self.query)
        self.live = ops.less(ops.reshape(at, small([1, 1, -1, 1]), False), start)
        self._of_tokens = ops.add(start, ops.reshape(new, small([1, 1, -1, 1]), False))
        of_new = ops.add(start, ops.reshape(new, small([1, 1, 1, -1]), False))
        of_past = ops.broadcast(at, ops.concat([self.batch, small([1, 1]), self.context], 0))
        self._offsets = ops.concat([of_past, of_new], -1)
        self._there = ops.concat([ops.less(at, start), ops.greater_equal(of_new, start)], -1)
        self.of_keys = ops.convert(self._offsets, ov.Type.f32)

    def parts(self, shares: Any) -> tuple[Any, Any]:
        small = self.constants.small
        ends = small([0]), self.context, small([np.iinfo(np.int32).max])
        of_past, of_new = (ops.slice(shares, *ends[i : i + 2], small([1]), small([3])) for i in range(2))
        return of_past, of_new

    def mask(self, window: int, groups: int) -> Any:
        """Live cached tokens, and tokens that are not ahead."""
        small = self.constants.small
        mask = ops.logical_and(self._there, ops.less_equal(self._offsets, self._of_tokens))
        if window > 0:
            first = ops.subtract(self._of_tokens, small(window))
            mask = ops.logical_and(mask, ops.greater(self._offsets, first))
        return ops.tile(mask, small([1, 1, groups, 1]))

    def cached(self, cache: Any, heads: int, size: int) -> Any:
        """Gather [B, H, S, D] from a cache."""
        small = self.constants.small
        blocks = ops.transpose(ops.gather(cache, self._tables, small(0)), small([0, 2, 1, 3, 4]))
        return ops.reshape(blocks, self.shape("B", heads, -1, size), False)


class _Own(ov.Op):  # type: ignore[misc, unused-ignore]
    """An OpenVINO operator with the name of its class, whose output is like its input `like`."""

    def __init__(self, inputs: Sequence[Any], like: int, attrs: Mapping[str, Any]) -> None:
        self._like, self._attrs = like, dict(attrs)
        super().__init__(self, [output_of(x) for x in inputs])

    def validate_and_infer_types(self) -> None:
        self.set_output_type(0, self.get_input_element_type(self._like), self.get_input_partial_shape(self._like))

    def visit_attributes(self, visitor: Any) -> bool:
        visitor.on_attributes(self._attrs)
        return True


class PagedCausalConv1D(_Own):
    """x [T, C], table [rows, C, K], weight [C, 1, K], bias [C] or [0], the step's inputs → [T, C]."""


class PagedGatedDeltaNet(_Own):
    """query, key [T, Hk, Dk], value [T, Hv, Dv], table [rows, Hv, Dv, Dk], decay, beta [T, Hv], the step's inputs →
    [T, Hv, Dv]."""


class PagedSelectiveSSM(_Own):
    """rate [H], step [T, H], write [T, G, N], x [T, H, P], read [T, G, N], table [rows, H, P, N], the step's inputs →
    [T, H, P]."""


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
PER_TOKEN = ("input_ids", "position_ids", "rows", ADAPTERS)
"""Inputs with a value for each token of a decode step."""
OF_STATES = ("state_rows", "state_begins", "state_interval")
KEY_VALUE = ("key", "value")


class PagedModel(GraphModel):
    """Builds `model` from `graph` for `rows` decode rows, None for any rows and tokens.

    `wide`: values are as wide as keys in the cache (runtime/executors/openvino/blocks.py in u8). `rings`: the
    ring-buffer slots of each pair of keys and values, None where it holds all tokens.
    """

    def __init__(
        self, graph: Graph, weights: WeightFormat, *, rows: int | None = None, top_k: int = 0, wide: bool = False,
        rings: Sequence[int | None] = (),
    ) -> None:  # fmt: skip
        fixed = dict.fromkeys(PER_TOKEN, rows or -1)
        inputs = {name: parameter(name, [fixed.get(name, d) for d in shape], dtype) for name, shape, dtype in INPUTS}
        there: dict[Value, Any] = {}
        if ADAPTERS in graph.inputs:
            inputs[ADAPTERS] = there[graph.inputs[ADAPTERS]] = parameter(ADAPTERS, [fixed[ADAPTERS]], np.int64)
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
            self._count_plain("attention", why)
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
        new = [rows.headed(x, heads, size) for _, x, (heads, size) in kept]
        for what, x in zip(KEY_VALUE, new, strict=True):
            self._given.setdefault(f"new_{what}.{pair}", x)
        past = [rows.cached(cache, heads, size) for cache, _, (heads, size) in kept]
        return self.attend(rows, node, query, new, past)

    def _count_plain(self, what: str, why: str) -> None:
        self.plain[what] = self.plain.get(what, (0, ""))[0] + 1, why

    def _op_causal_conv(self, node: Node) -> list[Any]:
        x, weight, bias, state = node.inputs[:4]
        assert weight is not None
        small, (channels, width) = self.constants.small, (int(n) for n in weight.shape)
        kernel = ops.reshape(self.get(weight), small([channels, 1, width]), False)
        added = small([], np.float32) if bias is None else self.get(bias)
        table = self._state_table("conv", state, [channels, width])
        built = PagedCausalConv1D([self.get(x), table, kernel, added, *self._step_of_states()], 0, {}).output(0)
        return [ops.swish(built, small(1, np.float32)).output(0) if node.attrs["silu"] else built]

    def _op_gated_delta(self, node: Node) -> list[Any]:
        query, key, value, decay, beta, state = node.inputs[:6]
        assert state is not None
        heads, size, width = (int(n) for n in state.shape[1:])
        table = self._state_table("delta", state, [heads, width, size])
        vectors, factors = (map(self.get, values) for values in ((query, key, value), (decay, beta)))
        given = [*vectors, table, *factors, *self._step_of_states()]
        norm = {"q_l2_norm_eps": NORM_EPS, "k_l2_norm_eps": NORM_EPS}
        attrs = {"use_qk_l2norm": bool(node.attrs["normalise"]), **norm}
        return [PagedGatedDeltaNet(given, 2, attrs).output(0)]

    def _op_state_scan(self, node: Node) -> list[Any]:
        x, step, rate, write, read, state = node.inputs[:6]
        assert rate is not None
        assert state is not None
        if len(rate.shape) > 1:
            return self._columns(node)
        table = self._state_table("scan", state, [int(n) for n in state.shape[1:]])
        given = [*map(self.get, (rate, step, write, x, read)), table, *self._step_of_states()]
        return [PagedSelectiveSSM(given, 3, {}).output(0)]

    def _columns(self, node: Node) -> list[Any]:
        """Channels of one value each, with states [N, C]; the N columns decay by `rate` [C, N].

        The loop's body has no constants, because the weights file has none for it.
        """
        x, step, rate, write, read, state = node.inputs[:6]
        assert state is not None
        channels, width, columns = (int(n) for n in state.shape[1:])
        if width != 1 or write is None or write.shape[2] != 1:
            raise CompileError(f"a scan of columns over {state.shape} has no OpenVINO lowering (at {node.out})")
        self._count_plain("states", "no OpenVINO operator decays each column at its own rate; a loop takes tokens")
        small = self.constants.small
        self._one_length = rows = self._one_length or OneLength(self.constants, self._of_pool("step_sizes", None))

        def apart(value: Any, *sizes: int) -> Any:
            return ops.reshape(value, rows.shape("B", -1, *sizes), False)

        steps = apart(self.get(step), 1, channels)
        rates = ops.transpose(self.get(rate), small([1, 0]))
        given = [
            ops.exp(ops.multiply(steps, rates)), ops.multiply(apart(self.get(x), 1, channels), steps),
            apart(self.get(write), columns, 1), apart(self.get(read), 1, columns),
        ]  # fmt: skip
        table = self._state_table("columns", state, [columns, channels])
        pairs = ops.reshape(self._input("state_rows", [-1]), small([-1, 2]), False)
        held = ops.unsqueeze(ops.gather(table, ops.gather(pairs, small(0), small(1)), small(0)), small([1]))
        shapes = [(columns, channels), (columns, channels), (1, channels), (columns, 1), (1, columns)]
        before, decay_factor, taken, written, requested = inner = [
            ops.parameter([-1, 1, *shape], ov.Type.f32) for shape in shapes
        ]
        after = ops.result(ops.add(ops.multiply(before, decay_factor), ops.multiply(taken, written)))
        token = ops.result(ops.matmul(requested, after.input_value(0), False, False))
        loop = ops.tensor_iterator()
        loop.set_body(ov.Model([after, token], inner, "token"))
        loop.set_merged_input(before, output_of(held), after.output(0))
        for taken_by, values in zip(inner[1:], given, strict=True):
            loop.set_sliced_input(taken_by, output_of(values), 0, 1, 1, -1, 1)
        last = loop.get_iter_value(after.output(0), -1)
        tokens = loop.get_concatenated_slices(token.output(0), 0, 1, 1, -1, 1)
        self._given[f"new_state.{self._states.index(state)}"] = ops.squeeze(last, small([1]))
        return [ops.reshape(tokens, small([-1, channels, 1]), False)]

    def _state_table(self, layout: str, state: Value | None, shape: list[int]) -> Any:
        """The input for a state's table, `shape` in a row."""
        assert state is not None
        built = parameter(f"{layout}_state.{self._states.index(state)}", [-1, *shape], ov.Type.f32)
        self.caches.append(built)
        return built

    def _step_of_states(self) -> list[Any]:
        """The step inputs that follow a table in OpenVINO's operators."""
        rows, begins, interval = (self._input(name, [-1]) for name in OF_STATES)
        return [self.inputs["subsequence_begins"], rows, begins, self.inputs["past_lens"], interval]

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
