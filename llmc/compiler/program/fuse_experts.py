"""Experts of a traced graph (frontend/experts.py) as one operator a layer.

experts(x, ids, shares, gate_up, down)   [T, H] → [T, H]: Σ over the k experts e in ids[t] of
                                         shares[t, e] · (silu(gate) · up) · down[e]ᵀ, where gate ‖ up = x · gate_up[e]ᵀ
ids [T, k] int64, shares [T, k], gate_up [E, 2·I, H], down [E, H, I]. The rule matches arithmetic; what does not match
stays as `expert_linear`.
"""

from __future__ import annotations

from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.program.match import Matcher


def fuse_experts(graph: Graph) -> None:
    """Σ of the chosen experts' weighted results → experts."""
    m = Matcher(graph)
    for node in graph.nodes:
        inputs = _experts(m, node)
        if inputs is not None:
            node.op, node.inputs, node.attrs = "experts", inputs, {}


def _experts(m: Matcher, node: Node) -> list[Value | None] | None:
    weighted = m.made_by(node.inputs[0], "mul") if node.op == "sum" and node.attrs.get("dim") == [1] else None
    if weighted is None or node.attrs.get("keepdim") or len(weighted.inputs) != 2:
        return None
    down = m.made_by(weighted.inputs[0], "expert_linear")
    shares = m.made_by(weighted.inputs[1], "unsqueeze")
    gated = m.made_by(down.inputs[0], "mul") if down else None
    if down is None or shares is None or gated is None or len(gated.inputs) != 2 or shares.attrs["dim"] not in (2, -1):
        return None
    silu = m.made_by(gated.inputs[0], "silu")
    halves = m.made_by(silu.inputs[0], "chunk", "split") if silu else None
    into = m.made_by(halves.inputs[0], "expert_linear") if halves else None
    if silu is None or halves is None or into is None or halves.outputs != [silu.inputs[0], gated.inputs[1]]:
        return None
    x, gate_up, *more = into.inputs
    _, matrix, *others = down.inputs
    biases, ids = [more[:-1], others[:-1]], [more[-1], others[-1]]
    plain = not any(bias for pair in biases for bias in pair) and ids[0] is ids[1]
    if not plain or into.attrs.get("transposed") or down.attrs.get("transposed") or x is None or len(x.shape) != 2:
        return None
    return [x, ids[0], shares.inputs[0], gate_up, matrix]
