"""Experts as ONNX Runtime's operators: MoE, which reads the chosen experts alone, or llmc's own (kernels/)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from llmc.compiler.weights.recipes import Recipe

if TYPE_CHECKING:
    from llmc.compiler.program.ir import Node
    from llmc.compiler.targets.onnxruntime.emitter import Emitter


def emit_experts(to: Emitter, node: Node) -> None:
    """MoE chooses by itself, by a softmax over all experts and then the k largest.

    So it is given the logarithms of the model's own shares, and −∞ for experts that the model did not choose: the
    softmax of these is the shares over their sum, by which the result is multiplied. Source: ONNX Runtime 1.31,
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
