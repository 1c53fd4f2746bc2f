"""Attention and recurrent layers in ONNX.

Attention is ONNX Runtime's GroupQueryAttention where possible, and standard operators elsewhere. The operator's limits
were read from ONNX Runtime 1.31 (contrib_ops/cpu/bert/group_query_attention_helper.h) and confirmed by running it: head
sizes are a multiple of 8, those of rotary heads and their rotary part a multiple of 16; keys and values have one width.

Where caches of sliding-window layers begin at a later token (runtime/executors/onnxruntime/executor.py), their
attention uses cache offsets, and a separate operator applies rotary embedding by position.

`emit_whole_attention` is attention over whole texts, without a cache: matmuls, a mask and a softmax. Rule of
torch.nn.functional.scaled_dot_product_attention (torch 2.13): softmax(q · kᵀ · scale + mask) · v over [B, H, Q, D],
where a boolean mask is true for visible tokens; scale is 1 / √D unless given.

RECURRENT emits layers with recurrent state (frontend/recurrent.py). Each token's state update is prepared for
all tokens at once; a loop (ONNX's Scan) then applies them in order. A padding token decays by 1 and writes 0, which
leaves the state unchanged. Numbers of rows and tokens stay symbolic. RECURRENT_KERNELS emits the same operators as
llmc's own (kernels/source). There rows are packed, and each replaces the state of its slot in place. They take `rows`
instead of both lengths.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from llmc.compiler.frontend.chunked import NORM_EPS
from llmc.compiler.program.ir import Node, Value
from llmc.compiler.targets.onnxruntime.emitter import OWN, ROWS, Emitter
from llmc.errors import CompileError

MICROSOFT = "com.microsoft"
_UNSEEN = float(np.finfo(np.float32).min)
_HEAD, _TURNED = 8, 16


def emit_attention(to: Emitter, node: Node) -> None:
    """Emit a gqa node (program/fuse.py) with ONNX Runtime's operators."""
    dim, cos = int(node.attrs["head_dim"]), node.inputs[6]
    turned = 2 * int(cos.shape[1]) if cos is not None else 0
    plain = "value_dim" in node.attrs or "slopes" in node.attrs or node.optional(9) is not None
    if plain or dim % (_TURNED if turned else _HEAD) or turned % _TURNED:
        _Plain(to, node).emit()
        return
    seqlens, total = _lengths(to, node)
    q, k, v, past_k, past_v, _, cos_name, sin, *sinks = (to.name(x) for x in node.inputs)
    if to.rolls(node) and cos is not None:
        q, k, v = _turned_by_position(to, node)
        cos_name = sin = ""
    to.add(
        "GroupQueryAttention",
        [q, k, v, past_k, past_v, seqlens, total, cos_name, sin, *(["", "", *sinks] if sinks else [])],
        [o.name for o in node.outputs], MICROSOFT,
        num_heads=node.attrs["heads"], kv_num_heads=node.attrs["kv_heads"], scale=node.attrs["scale"],
        do_rotary=int(bool(cos_name)), rotary_interleaved=0, local_window_size=node.attrs["window"],
        softcap=node.attrs["softcap"],
    )  # fmt: skip


def _lengths(to: Emitter, node: Node) -> tuple[str, str]:
    """seqlens_k [B] (index of each row's last key, pad tokens counted) and the largest total length."""
    more = f"_{node.attrs['window']}" if to.rolls(node) else ""
    if to.is_new(f"seqlens_k{more}"):
        to.add("Shape", ["token_ids"], [f"query_length{more}"], start=1, end=2)
        to.add("Add", [to.held_lengths(node), f"query_length{more}"], [f"total_lengths{more}"])
        to.add("Sub", [f"total_lengths{more}", to.const([1])], [f"last_positions{more}"])
        to.add("Cast", [f"last_positions{more}"], [f"seqlens_k{more}"], to=TensorProto.INT32)
        to.add("ReduceMax", [f"total_lengths{more}"], [f"longest{more}"], keepdims=0)
        to.add("Cast", [f"longest{more}"], [f"total_length{more}"], to=TensorProto.INT32)
    return f"seqlens_k{more}", f"total_length{more}"


def _turned_by_position(to: Emitter, node: Node) -> list[str]:
    """Query and key of a gqa node with rotary embedding, and its value."""
    parts = _Plain(to, node)
    query, key, value = parts.parts()
    turned = 2 * int(node.value(6).shape[1])
    for i, (x, heads) in enumerate(((query, parts.heads), (key, parts.kv_heads))):
        tables = [to.name(table) for table in node.inputs[6:8]]
        to.add(
            "RotaryEmbedding", [x, to.positions(), *tables], [f"{node.out.name}_turned{i}"], MICROSOFT,
            num_heads=heads, rotary_embedding_dim=0 if turned == parts.dim else turned, interleaved=0,
        )  # fmt: skip
    return [f"{node.out.name}_turned0", f"{node.out.name}_turned1", value]


class _Plain:
    """One attention in standard operators; similar layers share masks and cache offsets.

    New keys and values are scattered into the cache, in place where past and present are one buffer.
    """

    def __init__(self, to: Emitter, node: Node) -> None:
        self.to, self.node, self.stem = to, node, node.out.name
        self.heads, self.kv_heads = int(node.attrs["heads"]), int(node.attrs["kv_heads"])
        self.dim = int(node.attrs["head_dim"])
        self.value_dim = int(node.attrs.get("value_dim", self.dim))
        self.past_k, self.past_v = node.value(3), node.value(4)

    def emit(self) -> None:
        query, key, value = self.parts()
        query, key = (self._turned(x, n) for x, n in ((query, self.heads), (key, self.kv_heads)))
        query = self._headed(query, self.heads, self.dim)
        present = [
            self._appended(self._headed(new, self.kv_heads, width), past, built.name)
            for new, width, past, built in (
                (key, self.dim, self.past_k, self.node.outputs[1]),
                (value, self.value_dim, self.past_v, self.node.outputs[2]),
            )
        ]
        live, zero = self._live(), self.to.const(0, np.float32)  # 0 · NaN is NaN, so replace values of unused slots
        keys, values = (self._add("Where", [live, x, zero], f"live{i}") for i, x in enumerate(present))
        shares = self._shares(self._scores(query, keys))
        rows = self.heads // self.kv_heads
        grouped = self.to.sizes(["B", self.kv_heads, f"{rows}*Q", self.past_k.shape[2]])
        out = self._add("MatMul", [self._add("Reshape", [shares, grouped], "shares_grouped"), values], "mixed")
        out = self._add("Reshape", [out, self.to.sizes(["B", self.heads, "Q", self.value_dim])], "by_head")
        out = self._add("Transpose", [out], "by_token", perm=[0, 2, 1, 3])
        self.to.add("Reshape", [out, self.to.const([0, 0, -1])], [self.stem])

    def _add(self, op: str, inputs: list[str], what: str, domain: str = "", **attrs: Any) -> str:
        return self.to.add(op, inputs, [f"{self.stem}_{what}"], domain, **attrs)

    def parts(self) -> list[str]:
        q, k, v = (self.to.name(x) for x in self.node.inputs[:3])
        if k:
            return [q, k, v]
        widths = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.value_dim]
        names = [f"{self.stem}_{what}" for what in "qkv"]
        self.to.add("Split", [q, self.to.const(widths)], names, axis=-1)
        return names

    def _turned(self, x: str, heads: int) -> str:
        """Rotary embedding of [B, Q, H · D]: rotates the halves of each head's first values."""
        cos, sin = self.node.inputs[6:8]
        if cos is None or sin is None:
            return x
        half, what = int(cos.shape[1]), f"turned{heads}_{x}"
        x = self._add("Reshape", [x, self.to.const([0, 0, heads, self.dim])], f"{what}_heads")
        names = [f"{self.stem}_{what}_{part}" for part in ("low", "high", "rest")]
        widths = [half, half, self.dim - 2 * half]
        self.to.add("Split", [x, self.to.const(widths)], names, axis=-1)
        low, high, rest = names
        c, s = (self._angles(table) for table in (cos, sin))
        matmuls = [
            self._add("Mul", [a, b], f"{what}_{i}")
            for i, (a, b) in enumerate(((low, c), (high, s), (high, c), (low, s)))
        ]
        first = self._add("Sub", matmuls[:2], f"{what}_first")
        second = self._add("Add", matmuls[2:], f"{what}_second")
        x = self._add("Concat", [first, second, rest], f"{what}_whole", axis=-1)
        return self._add("Reshape", [x, self.to.const([0, 0, -1])], f"{what}_flat")

    def _angles(self, table: Value) -> str:
        """[B, Q, 1, D' / 2] of a table [P, D' / 2]."""
        name = f"{table.name}_angles"
        if self.to.is_new(name):
            last = self.to.const(int(table.shape[0]) - 1)
            offsets = self.to.add("Min", [self.to.positions(), last], [f"{name}_places"])
            rows = self.to.add("Gather", [self.to.name(table), offsets], [f"{name}_rows"])
            self.to.add("Unsqueeze", [rows, self.to.const([2])], [name])
        return name

    def _headed(self, x: str, heads: int, width: int) -> str:
        """[B, Q, H · D] → [B, H, Q, D]."""
        apart = self._add("Reshape", [x, self.to.const([0, 0, heads, width])], f"{x}_apart")
        return self._add("Transpose", [apart], f"{x}_heads", perm=[0, 2, 1, 3])

    def _appended(self, new: str, past: Value, present: str) -> str:
        return self.to.add("ScatterND", [self.to.name(past), self._offsets(), new], [present])

    def _offsets(self) -> str:
        """Cache indices of new tokens: [B, Hkv, Q, 3], as (row, head, position)."""
        name, to = f"places_{self.kv_heads}{self._more}", self.to
        if to.is_new(name):
            shape = to.sizes(["B", self.kv_heads, "Q", 1])
            batch = to.add("Squeeze", [to.sizes(["B"])], [f"{name}_batch"])
            rows = to.add("Range", [to.const(0), batch, to.const(1)], [f"{name}_range"])
            axes = {
                "rows": (rows, [1, 2, 3]), "heads": (to.const(np.arange(self.kv_heads)), [0, 2, 3]),
                "positions": (self._held_positions(), [1, 3]),
            }  # fmt: skip
            wide = []
            for what, (values, dims) in axes.items():
                to.add("Unsqueeze", [values, to.const(dims)], [f"{name}_{what}"])
                wide.append(to.add("Expand", [f"{name}_{what}", shape], [f"{name}_{what}_wide"]))
            to.add("Concat", wide, [name], axis=-1)
        return name

    def _capacity(self) -> str:
        """Slots of the cache, [S]."""
        name, to = f"cache_places{self._more}", self.to
        if to.is_new(name):
            to.add("Shape", [to.name(self.past_k)], [f"{name}_size"], start=2, end=3)
            to.add("Squeeze", [f"{name}_size"], [f"{name}_count"])
            to.add("Range", [to.const(0), f"{name}_count", to.const(1)], [name])
        return name

    @property
    def _more(self) -> str:
        """Name suffix of values that layers with the same cache start share."""
        return f"_{self.node.attrs['window']}" if self.to.rolls(self.node) else ""

    def _held_positions(self) -> str:
        """Cache slot of each token, [B, Q]."""
        name, to = f"held_positions{self._more}", self.to
        if not self._more:
            return to.positions()
        if to.is_new(name):
            window = int(self.node.attrs["window"])
            to.add("Unsqueeze", [to.starts(window), to.const([1])], [f"{name}_starts"])
            to.add("Sub", [to.positions(), f"{name}_starts"], [name])
        return name

    def _live(self) -> str:
        """Whether a slot holds a token of the sequence, padding of this step included: [B, 1, S, 1]."""
        name, to = f"cache_live{self._more}", self.to
        if to.is_new(name):
            end = to.add("ReduceMax", [self._held_positions(), to.const([1])], [f"{name}_end"], keepdims=1)
            flat = to.add("LessOrEqual", [self._capacity(), end], [f"{name}_flat"])
            to.add("Unsqueeze", [flat, to.const([1, 3])], [name])
        return name

    def _seen(self) -> str:
        """Whether a token sees a slot: [B, 1, Q, S]."""
        window = int(self.node.attrs["window"])
        name, to = f"seen_{max(0, window)}", self.to
        if to.is_new(name):
            at = to.add("Unsqueeze", [self._held_positions(), to.const([1, 3])], [f"{name}_at"])
            if window <= 0:
                to.add("LessOrEqual", [self._capacity(), at], [name])
            else:
                before = to.add("LessOrEqual", [self._capacity(), at], [f"{name}_before"])
                first = to.add("Sub", [at, to.const(window)], [f"{name}_first"])
                within = to.add("Greater", [self._capacity(), first], [f"{name}_within"])
                to.add("And", [before, within], [name])
        return name

    def _scores(self, query: str, keys: str) -> str:
        """[B, Hq, Q, S]: the heads of a group are rows of one matmul with their key head."""
        scaled = self._add("Mul", [query, self.to.const(self.node.attrs["scale"], np.float32)], "scaled")
        grouped = self._add("Reshape", [scaled, self.to.const([0, self.kv_heads, -1, self.dim])], "grouped")
        turned = self._add("Transpose", [keys], "keys_turned", perm=[0, 1, 3, 2])
        scores = self._add("MatMul", [grouped, turned], "scores")
        by_head = self.to.sizes(["B", self.heads, "Q", self.past_k.shape[2]])
        scores = self._add("Reshape", [scores, by_head], "scores_by_head")
        if self.node.attrs["softcap"]:
            cap = self.to.const(self.node.attrs["softcap"], np.float32)
            scores = self._add(
                "Mul", [self._add("Tanh", [self._add("Div", [scores, cap], "part")], "capped"), cap], "cap"
            )
        if "slopes" in self.node.attrs or self.node.optional(9):
            scores = self._add("Add", [scores, self._by_offset()], "with_places")
        return self._add("Where", [self._seen(), scores, self.to.const(_UNSEEN, np.float32)], "scores_seen")

    def _by_offset(self) -> str:
        """Each head's bias by key offset, from a table or slopes: [Hq, 1, S]."""
        to = self.to
        if table := self.node.optional(9):
            name = f"{table.name}_by_offset"
            if to.is_new(name):
                offsets = to.add("Min", [self._capacity(), to.const(int(table.shape[1]) - 1)], [f"{name}_places"])
                rows = to.add("Gather", [to.name(table), offsets], [f"{name}_rows"], axis=1)
                to.add("Unsqueeze", [rows, to.const([1])], [name])
            return name
        slopes = np.asarray(self.node.attrs["slopes"], np.float32)
        name = f"by_offset_{zlib.crc32(slopes.tobytes()):x}"
        if to.is_new(name):
            offsets = to.add("Cast", [self._capacity()], [f"{name}_places"], to=TensorProto.FLOAT)
            to.add("Mul", [to.const(slopes[:, None, None], np.float32), offsets], [name])
        return name

    def _shares(self, scores: str) -> str:
        given = self.node.optional(8)
        if given is None:
            return self._add("Softmax", [scores], "shares", axis=-1)
        sinks = self._add("Reshape", [self.to.name(given), self.to.const([1, -1, 1, 1])], "sinks")
        column = self._add("Expand", [sinks, self.to.sizes(["B", self.heads, "Q", 1])], "sinks_wide")
        shares = self._add("Softmax", [self._add("Concat", [scores, column], "with_sinks", axis=-1)], "all", axis=-1)
        ends = [self.to.const([n]) for n in (0, -1, -1)]
        return self._add("Slice", [shares, *ends], "shares")


def emit_whole_attention(to: Emitter, node: Node) -> None:
    """Emit an attention node of a program without a cache. Raises CompileError for a form that encoders do not have."""
    query, key, value, *mask = node.given
    if node.attrs.get("is_causal") or node.attrs.get("dropout_p") or query.shape[1] != key.shape[1]:
        raise CompileError(
            f"attention with {node.attrs} over {key.shape[1]} heads has no ONNX lowering (at {node.out})"
        )
    stem = node.out.name
    scale = float(node.attrs.get("scale") or 1 / math.sqrt(int(query.shape[-1])))
    factors = [to.name(query), to.name(key)]
    scores = to.add("FusedMatMul", factors, [f"{stem}_scores"], MICROSOFT, transB=1, alpha=scale)
    if mask:
        scores = to.add("Add", [scores, _added(to, mask[0])], [f"{stem}_seen"])
    shares = to.add("Softmax", [scores], [f"{stem}_shares"], axis=-1)
    to.add("MatMul", [shares, to.name(value)], [stem])


def _added(to: Emitter, mask: Value) -> str:
    """Additive mask shared by all layers: 0 where a token is seen, the least number elsewhere."""
    if mask.dtype != "bool":
        return to.name(mask)
    name = f"{mask.name}_added"
    if name not in to.shared:
        zero, unseen = (to.const(number, np.float32) for number in (0, _UNSEEN))
        to.shared[name] = to.add("Where", [to.name(mask), zero, unseen], [name])
    return name


def _causal_conv(to: Emitter, node: Node) -> None:
    x, weight, bias, state, past, new = (to.name(v) for v in node.inputs)
    out, kept = (o.name for o in node.outputs)
    channels, width = (int(n) for n in node.value(1).shape)
    before = _before(to, state, past, out, 3)
    to.add("Concat", [before, x], [f"{out}_seen"], axis=1)
    to.add("Transpose", [f"{out}_seen"], [f"{out}_channels"], perm=[0, 2, 1])
    to.add("Reshape", [weight, to.const([channels, 1, width])], [f"{out}_weight"])
    given = [f"{out}_channels", f"{out}_weight", *([bias] if bias else [])]
    built = to.add("Conv", given, [f"{out}_convolved"], group=channels, kernel_shape=[width])
    if node.attrs["silu"]:
        built = to.add("QuickGelu", [built], [f"{out}_gated"], "com.microsoft", alpha=1.0)
    to.add("Transpose", [built], [out], perm=[0, 2, 1])
    to.add("Unsqueeze", [new, to.const([1])], [f"{out}_ends"])
    to.add("Add", [f"{out}_ends", to.const([list(range(width - 1))])], [f"{out}_places"])
    to.add("Unsqueeze", [f"{out}_places", to.const([2])], [f"{out}_indices"])
    to.add("GatherND", [f"{out}_seen", f"{out}_indices"], [kept], batch_dims=1)


def _gated_delta(to: Emitter, node: Node) -> None:
    query, key, value, decay, beta, state, past, new = (to.name(v) for v in node.inputs)
    out, kept = (o.name for o in node.outputs)
    heads, groups, size = int(node.outputs[1].shape[1]), *map(int, node.value(1).shape[2:])
    vectors = []
    for what, given in (("query", query), ("key", key)):
        named = _by_head(to, given, f"{out}_{what}", groups, heads, size)
        vectors.append(_normal(to, named) if node.attrs["normalise"] else named)
    scaled = to.add("Mul", [vectors[0], to.const(size**-0.5, np.float32)], [f"{out}_scaled"])
    live = _live(to, new)
    decays = to.add("Exp", [_masked(to, decay, live, f"{out}_fades")], [f"{out}_faded"])
    learns = _masked(to, beta, live, f"{out}_learns")
    each = [
        _spread(to, scaled, [3], f"{out}_reads"), _spread(to, vectors[1], [3], f"{out}_rows"),
        _spread(to, vectors[1], [4], f"{out}_columns"), _spread(to, value, [3], f"{out}_values"),
        _spread(to, decays, [3, 4], f"{out}_each_fades"), _spread(to, learns, [3, 4], f"{out}_each_learns"),
    ]  # fmt: skip
    body = [
        helper.make_node("Mul", ["held", "fade"], ["faded"]),
        helper.make_node("MatMul", ["row", "faded"], ["known"]),
        helper.make_node("Sub", ["value", "known"], ["missing"]),
        helper.make_node("Mul", ["missing", "learn"], ["learnt"]),
        helper.make_node("Mul", ["column", "learnt"], ["written"]),
        helper.make_node("Add", ["faded", "written"], ["after"]),
        helper.make_node("MatMul", ["read", "after"], ["token"]),
    ]
    taken = ["read", "row", "column", "value", "fade", "learn"]
    before = _before(to, state, past, out, 4)
    _scan(to, body, taken, [before, *each], [kept, f"{out}_tokens"])
    to.add("Squeeze", [f"{out}_tokens", to.const([3])], [out])


def _state_scan(to: Emitter, node: Node) -> None:
    x, step, rate, write, read, state, past, new = (to.name(v) for v in node.inputs)
    out, kept = (o.name for o in node.outputs)
    heads, groups, size = int(node.outputs[1].shape[1]), *map(int, node.value(3).shape[2:])
    steps = _spread(to, _masked(to, step, _live(to, new), f"{out}_steps"), [3, 4], f"{out}_each_step")
    columns = 1 if len(node.value(2).shape) == 1 else size
    to.add("Reshape", [rate, to.const([heads, 1, columns])], [f"{out}_rates"])
    to.add("Mul", [steps, f"{out}_rates"], [f"{out}_fading"])
    to.add("Mul", [_spread(to, x, [4], f"{out}_inputs"), steps], [f"{out}_each_input"])
    written, requested = (
        _by_head(to, name, f"{out}_{what}", groups, heads, size) for what, name in (("write", write), ("read", read))
    )
    each = [
        f"{out}_each_input", to.add("Exp", [f"{out}_fading"], [f"{out}_each_fades"]),
        _spread(to, written, [3], f"{out}_each_write"), _spread(to, requested, [4], f"{out}_each_read"),
    ]  # fmt: skip
    body = [
        helper.make_node("Mul", ["held", "fade"], ["faded"]),
        helper.make_node("Mul", ["input", "write"], ["written"]),
        helper.make_node("Add", ["faded", "written"], ["after"]),
        helper.make_node("MatMul", ["after", "read"], ["token"]),
    ]
    before = _before(to, state, past, out, 4)
    _scan(to, body, ["input", "fade", "write", "read"], [before, *each], [kept, f"{out}_tokens"])
    to.add("Squeeze", [f"{out}_tokens", to.const([4])], [out])


def _scan(
    to: Emitter, body: Sequence[NodeProto], taken: Sequence[str], given: Sequence[str], built: Sequence[str]
) -> None:
    """A loop over axis 1 of `given` but the state: `body` computes "after" and "token" from "held" and `taken`."""

    def described(name: str) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

    inputs = [described(name) for name in ("held", *taken)]
    graph = helper.make_graph(list(body), "token", inputs, [described("after"), described("token")])
    to.add(
        "Scan", list(given), list(built), body=graph, num_scan_inputs=len(taken),
        scan_input_axes=[1] * len(taken), scan_output_axes=[1],
    )  # fmt: skip


def _before(to: Emitter, state: str, past: str, out: str, rank: int) -> str:
    """The state at the start of a step: zeros in rows without a past."""
    to.add("Reshape", [past, to.const([-1] + [1] * (rank - 1))], [f"{out}_past"])
    to.add("Greater", [f"{out}_past", to.const(0)], [f"{out}_started"])
    return to.add("Where", [f"{out}_started", state, to.const(0.0, np.float32)], [f"{out}_before"])


def _live(to: Emitter, new: str) -> str:
    """Whether each token is no padding, [B, Q, 1]."""
    if to.is_new("live_tokens"):
        to.add("Shape", ["token_ids"], ["live_count"], start=1, end=2)
        to.add("Squeeze", ["live_count"], ["live_end"])
        to.add("Range", [to.const(0), "live_end", to.const(1)], ["live_places"])
        to.add("Unsqueeze", [new, to.const([1])], ["live_lengths"])
        to.add("Less", ["live_places", "live_lengths"], ["live_rows"])
        to.add("Unsqueeze", ["live_rows", to.const([2])], ["live_tokens"])
    return "live_tokens"


def _masked(to: Emitter, value: str, live: str, name: str) -> str:
    return to.add("Where", [live, value, to.const(0.0, np.float32)], [name])


def _spread(to: Emitter, value: str, axes: list[int], name: str) -> str:
    return to.add("Unsqueeze", [value, to.const(axes)], [name])


def _by_head(to: Emitter, value: str, name: str, groups: int, heads: int, size: int) -> str:
    """[B, Q, G, D] → [B, Q, H, D], repeating each of the G for H / G adjacent heads."""
    if groups == heads:
        return value
    to.add("Unsqueeze", [value, to.const([3])], [f"{name}_groups"])
    to.add("Expand", [f"{name}_groups", to.const([1, 1, 1, heads // groups, 1])], [f"{name}_shared"])
    return to.add("Reshape", [f"{name}_shared", to.const([0, 0, heads, size])], [f"{name}_heads"])


def _normal(to: Emitter, value: str) -> str:
    to.add("ReduceSumSquare", [value, to.const([-1])], [f"{value}_squares"], keepdims=1)
    to.add("Add", [f"{value}_squares", to.const(NORM_EPS, np.float32)], [f"{value}_padded"])
    to.add("Sqrt", [f"{value}_padded"], [f"{value}_length"])
    return to.add("Div", [value, f"{value}_length"], [f"{value}_normal"])


RECURRENT: Mapping[str, Callable[[Emitter, Node], None]] = {
    "causal_conv": _causal_conv, "gated_delta": _gated_delta, "state_scan": _state_scan,
}  # fmt: skip
"""Emitters by operator name in program/ir.py."""


RECURRENT_KERNELS = {"causal_conv": "CausalConv", "gated_delta": "GatedDelta", "state_scan": "StateScan"}
"""llmc's operators by operator name in program/ir.py."""


def emit_recurrent_kernel(to: Emitter, node: Node) -> None:
    """Emit one of RECURRENT_KERNELS."""
    *given, _, _ = (to.name(v) for v in node.inputs)
    attrs = {name: int(flag) for name, flag in node.attrs.items() if name in ("silu", "normalise")}
    eps = {"eps": NORM_EPS} if "normalise" in attrs else {}
    to.add(RECURRENT_KERNELS[node.op], [*given, ROWS], [o.name for o in node.outputs], OWN, **attrs, **eps)
