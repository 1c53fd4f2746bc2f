"""Experts in ONNX: the operator MoE, which reads only the chosen experts, or llmc's own (kernels/).

Other forms (gates other than silu, biases, weights [in, out]) are two matmuls with the operators in between: llmc's
ExpertLinear, or a loop over the experts that any token chose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper

from llmc.compiler.targets.onnxruntime.emitter import OWN
from llmc.compiler.targets.onnxruntime.formats import TABLES
from llmc.compiler.targets.onnxruntime.kernels.panels import panel_bytes, part_of
from llmc.compiler.targets.onnxruntime.options import takes_experts
from llmc.compiler.weights.recipes import Recipe

if TYPE_CHECKING:
    from llmc.compiler.program.ir import Node, Value
    from llmc.compiler.targets.onnxruntime.emitter import Emitter
    from llmc.compiler.targets.onnxruntime.formats import MatrixFormat


def emit_experts(to: Emitter, node: Node) -> None:
    """Emit llmc's kernel where it runs and takes the experts' features, else MoE."""
    *_, down = node.inputs
    assert down is not None
    if to.options.panels and takes_experts(int(down.shape[2])):
        _emit_own(to, node)
    else:
        _emit_moe(to, node)


def _emit_own(to: Emitter, node: Node) -> None:
    x, ids, shares, gate_up, down = node.inputs
    assert gate_up is not None
    assert down is not None
    count, hidden, features = (int(d) for d in down.shape)
    names = to.graph.weights[gate_up], to.graph.weights[down]
    into, out = to.options.expert_formats(*names, hidden, features)
    panels = [_panels(to, gate_up, into, "gated"), _panels(to, down, out, "panels")]
    to.add(
        "Experts", [to.name(x), to.name(ids), to.name(shares), *panels], [node.out.name], OWN,
        experts=count, hidden=hidden, features=features, group=into.block, down_group=out.block,
        bits=into.bits, offsets=into.beside, table=TABLES.index(into.table),
    )  # fmt: skip


def _emit_own_linear(to: Emitter, node: Node) -> None:
    x, weight, *bias, ids = node.inputs
    assert x is not None
    assert weight is not None
    turned = bool(node.attrs.get("transposed", False))
    count, rows, width = _sizes(weight, turned=turned)
    held = to.options.format([to.graph.weights[weight]], width, normed=len(x.shape) == 2)
    panels = _panels(to, weight, held, "panels", turned=turned)
    names = [to.name(v) for v in bias if v is not None]
    to.add(
        "ExpertLinear", [to.name(x), to.name(ids), panels, *names], [node.out.name], OWN, experts=count, rows=rows,
        width=width, group=held.block, bits=held.bits, offsets=held.beside, table=TABLES.index(held.table),
    )  # fmt: skip


def _sizes(tensor: Value, *, turned: bool) -> tuple[int, int, int]:
    """Number of experts, and rows and inputs of each one's matrix."""
    count, rows, width = (int(d) for d in tensor.shape)
    return (count, width, rows) if turned else (count, rows, width)


def _panels(to: Emitter, tensor: Value, held: MatrixFormat, part: str, *, turned: bool = False) -> str:
    source, part = to.graph.weights[tensor], part_of(part, held)
    count, rows, width = _sizes(tensor, turned=turned)
    family = f"{'turned' if turned and 'kept' not in held.family else 'each'}p{held.family}"
    recipe = Recipe(f"{source}.{family}_{part}", f"{family}_{part}", (source,), held.block, held.reordered)
    size = count * panel_bytes(rows, width, held.block, held.bits, held.offsets)
    return to.external(recipe, TensorProto.UINT8, (size,))


def _emit_moe(to: Emitter, node: Node) -> None:
    """MoE chooses by itself, by a softmax over all experts and then the k largest.

    Its input is therefore the logarithm of the model's own shares, and −∞ for experts that the model did not choose:
    the softmax is the shares over their sum, by which the result is multiplied. Source: ONNX Runtime 1.31,
    contrib_ops/cpu/moe/moe_cpu.cc; its SwiGLU is silu(gate) · up with alpha 1, beta 0 and no limit.
    """
    x, ids, shares, gate_up, down = node.inputs
    assert ids is not None
    assert gate_up is not None
    assert down is not None
    stem, count = node.out.name, int(gate_up.shape[0])
    to.add("Shape", [to.name(ids)], [f"{stem}_tokens"], start=0, end=1)
    to.add("Concat", [f"{stem}_tokens", to.const([count])], [f"{stem}_all"], axis=0)
    to.add("Expand", [to.const(-np.inf, np.float32), f"{stem}_all"], [f"{stem}_none"])
    to.add("Log", [to.name(shares)], [f"{stem}_logarithms"])
    to.add("ScatterElements", [f"{stem}_none", to.name(ids), f"{stem}_logarithms"], [f"{stem}_router"], axis=1)
    source = to.graph.weights[gate_up]
    recipe = Recipe(f"{source}.in_turn", "experts_in_turn", (source,))
    into = to.external(recipe, TensorProto.FLOAT, tuple(int(d) for d in gate_up.shape))
    to.add(
        "MoE", [to.name(x), f"{stem}_router", into, "", to.name(down)], [f"{stem}_mean"], "com.microsoft",
        k=int(ids.shape[1]), activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0,
        normalize_routing_weights=1,
    )  # fmt: skip
    to.add("ReduceSum", [to.name(shares), to.const([1])], [f"{stem}_sum"], keepdims=1)
    to.add("Mul", [f"{stem}_mean", f"{stem}_sum"], [stem])


def emit_expert_linear(to: Emitter, node: Node) -> None:
    """Emit matmuls with each token's chosen experts (frontend/traceable.py)."""
    if to.options.panels:
        _emit_own_linear(to, node)
        return
    x, weight, *bias, ids = node.inputs
    assert x is not None
    assert weight is not None
    out, names = node.out.name, [to.name(v) for v in bias if v is not None]
    chosen, matrices = to.name(ids), to.name(weight)
    hit = to.add("Unique", [chosen], [f"{out}_hit"])
    to.add("Shape", [chosen], [f"{out}_rows"])
    to.add("Concat", [f"{out}_rows", to.const([node.out.shape[2]])], [f"{out}_shape"], axis=0)
    to.add("Expand", [to.const(0, np.float32), f"{out}_shape"], [f"{out}_none"])
    # names with a slash are internal to the loop: no outer tensor has one
    if len(x.shape) == 2:
        taken = [
            helper.make_node("Gather", ["each/places", to.const(0)], ["each/tokens"], axis=0),
            helper.make_node("Gather", [to.name(x), "each/tokens"], ["each/rows"], axis=0),
        ]
    else:
        taken = [helper.make_node("GatherND", [to.name(x), "each/places_of_rows"], ["each/rows"])]
    added = [helper.make_node("Gather", [name, "each/expert"], ["each/bias"], axis=0) for name in names]
    body = [
        helper.make_node("Identity", ["each/going"], ["each/goes_on"]),
        helper.make_node("Gather", [hit, "each/turn"], ["each/expert"], axis=0),
        helper.make_node("Equal", [chosen, "each/expert"], ["each/here"]),
        helper.make_node("NonZero", ["each/here"], ["each/places"]),
        helper.make_node("Transpose", ["each/places"], ["each/places_of_rows"], perm=[1, 0]),
        *taken,
        helper.make_node("Gather", [matrices, "each/expert"], ["each/matrix"], axis=0),
        *added,
        helper.make_node(
            "Gemm", ["each/rows", "each/matrix", *(["each/bias"] if names else [])], ["each/made"],
            transB=int(not node.attrs.get("transposed", False)),
        ),
        helper.make_node("ScatterND", ["each/held", "each/places_of_rows", "each/made"], ["each/after"]),
    ]  # fmt: skip
    infos = [
        helper.make_tensor_value_info(f"each/{name}", kind, shape)
        for name, kind, shape in (
            ("turn", TensorProto.INT64, []), ("going", TensorProto.BOOL, []), ("held", TensorProto.FLOAT, None),
            ("goes_on", TensorProto.BOOL, []), ("after", TensorProto.FLOAT, None),
        )
    ]  # fmt: skip
    to.add("Size", [hit], [f"{out}_turns"])
    graph = helper.make_graph(body, "expert", infos[:3], infos[3:])
    to.add("Loop", [f"{out}_turns", "", f"{out}_none"], [out], body=graph)
