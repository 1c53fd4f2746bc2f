"""Operators of layers with recurrent state (frontend/recurrent/operators.py) in ONNX: a convolution, and loops over
tokens.

Each token's state update is prepared for all tokens at once; a loop (ONNX's Scan) then applies them in order. A padding
token decays by 1 and writes 0, which leaves the state unchanged. Numbers of rows and tokens stay symbolic.

RECURRENT_KERNELS emits the same operators as llmc's own (kernels/source). There rows are packed, and each replaces the
state of its slot in place. They take `rows` instead of both lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from llmc.compiler.frontend.recurrent.chunked import NORM_EPS
from llmc.compiler.targets.onnxruntime.emitter import OWN, ROWS

if TYPE_CHECKING:
    from llmc.compiler.program.ir import Node
    from llmc.compiler.targets.onnxruntime.emitter import Emitter


def _causal_conv(to: Emitter, node: Node) -> None:
    x, weight, bias, state, past, new = (to.name(v) for v in node.inputs)
    out, kept = (o.name for o in node.outputs)
    assert node.inputs[1] is not None
    channels, width = (int(n) for n in node.inputs[1].shape)
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
    assert node.inputs[1] is not None
    heads, size = int(node.outputs[1].shape[1]), int(node.inputs[1].shape[3])
    vectors = []
    for what, given in (("query", query), ("key", key)):
        named = _by_head(to, given, f"{out}_{what}", int(node.inputs[1].shape[2]), heads, size)
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
    given, rates = node.inputs[3], node.inputs[2]
    assert given is not None
    assert rates is not None
    heads, groups, size = int(node.outputs[1].shape[1]), int(given.shape[2]), int(given.shape[3])
    steps = _spread(to, _masked(to, step, _live(to, new), f"{out}_steps"), [3, 4], f"{out}_each_step")
    columns = 1 if len(rates.shape) == 1 else size
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
    """A loop over axis 1 of all of `given` but the state: `body` computes "after" and "token" from "held" and
    `taken`.
    """

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
    if "live" not in to.shared:
        to.shared["live"] = "live_tokens"
        to.add("Shape", ["token_ids"], ["live_count"], start=1, end=2)
        to.add("Squeeze", ["live_count"], ["live_end"])
        to.add("Range", [to.const(0), "live_end", to.const(1)], ["live_places"])
        to.add("Unsqueeze", [new, to.const([1])], ["live_lengths"])
        to.add("Less", ["live_places", "live_lengths"], ["live_rows"])
        to.add("Unsqueeze", ["live_rows", to.const([2])], ["live_tokens"])
    return to.shared["live"]


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


def _own_causal_conv(to: Emitter, node: Node) -> None:
    _own(to, node, "CausalConv", silu=int(node.attrs["silu"]))


def _own_gated_delta(to: Emitter, node: Node) -> None:
    _own(to, node, "GatedDelta", normalise=int(node.attrs["normalise"]), eps=NORM_EPS)


def _own_state_scan(to: Emitter, node: Node) -> None:
    _own(to, node, "StateScan")


def _own(to: Emitter, node: Node, op: str, **attrs: Any) -> None:
    *given, _, _ = (to.name(v) for v in node.inputs)
    to.add(op, [*given, ROWS], [o.name for o in node.outputs], OWN, **attrs)


RECURRENT_KERNELS: Mapping[str, Callable[[Emitter, Node], None]] = {
    "causal_conv": _own_causal_conv, "gated_delta": _own_gated_delta, "state_scan": _own_state_scan,
}  # fmt: skip
"""Emitters by operator name in program/ir.py."""
