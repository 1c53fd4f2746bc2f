"""Experts of a traced graph (frontend/experts.py) as one operator a layer.

experts(x, ids, shares, gate_up, down)   [T, H] → [T, H]: Σ over the k experts e in ids[t] of
                                         shares[t, e] · (silu(gate) · up) · down[e]ᵀ, where gate ‖ up = x · gate_up[e]ᵀ
ids [T, k] int64, shares [T, k], gate_up [E, 2·I, H], down [E, H, I]. The rule matches arithmetic; what does not match
stays as `expert_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmc.compiler.program.ir import Graph, Node, Value

_Producers = Mapping[Value, Node]


def fuse_experts(graph: Graph) -> None:
    """Σ of the chosen experts' weighted results → experts."""
    producers = graph.producers()
    for node in graph.nodes:
        inputs = _experts(producers, node)
        if inputs is not None:
            node.op, node.inputs, node.attrs = "experts", inputs, {}


def _experts(producers: _Producers, node: Node) -> list[Value | None] | None:
    weighted = _made_by(producers, node.inputs[0], "mul") if node.op == "sum" and node.attrs.get("dim") == [1] else None
    if weighted is None or node.attrs.get("keepdim") or len(weighted.inputs) != 2:
        return None
    down = _made_by(producers, weighted.inputs[0], "expert_linear")
    shares = _made_by(producers, weighted.inputs[1], "unsqueeze")
    gated = _made_by(producers, down.inputs[0], "mul") if down else None
    if down is None or shares is None or gated is None or len(gated.inputs) != 2 or shares.attrs["dim"] not in (2, -1):
        return None
    silu = _made_by(producers, gated.inputs[0], "silu")
    halves = _made_by(producers, silu.inputs[0], "chunk", "split") if silu else None
    into = _made_by(producers, halves.inputs[0], "expert_linear") if halves else None
    if silu is None or halves is None or into is None or halves.outputs != [silu.inputs[0], gated.inputs[1]]:
        return None
    x, gate_up, *more = into.inputs
    _, matrix, *others = down.inputs
    biases, ids = [more[:-1], others[:-1]], [more[-1], others[-1]]
    plain = not any(bias for pair in biases for bias in pair) and ids[0] is ids[1]
    if not plain or into.attrs.get("transposed") or down.attrs.get("transposed") or x is None or len(x.shape) != 2:
        return None
    return [x, ids[0], shares.inputs[0], gate_up, matrix]


def _made_by(producers: _Producers, value: Value | None, *ops: str) -> Node | None:
    node = producers.get(value) if value is not None else None
    return node if node is not None and node.op in ops else None
