"""Rewrite the imported graph into the fused operators that compilers have kernels for.

rms_norm(x, weight; eps)                      x · rsqrt(mean(x²) + eps) · weight over the last axis; the weight may be a
                                              sum, such as 1 + w
skip_rms_norm(x, residual, weight; eps)       (rms_norm(x + residual), x + residual)
linear(x, w₀ … wₙ, b₀ … bₙ; parts)            x · concat(w)ᵀ + concat(b); `parts` are the widths of the pieces
split(x; parts)                               pieces of the last axis
gated_linear(x, w₀, w₁; parts) silu(x · w₀ᵀ) · (x · w₁ᵀ)
adapted(base, x, adapters, A, B₀ … Bₙ; ends)  base + (mask ⊙ (x · Aᵀ)) · concat(B)ᵀ, the mask of a token 1 at the
                                              ranks ends[a − 1] … ends[a] − 1 of its adapter a > 0, else 0
gqa(q, k, v, past k, past v, past_lengths, cos, sin; …)   rotary embedding, cache append and attention in one;
                                              k and v are None when q is the packed [B, Q, (Hq + 2·Hkv)·D]; cos and
                                              sin turn the first values of a head, both None where nothing turns; a
                                              ninth input is sinks [Hq], a tenth [Hq, P] what scores grow by at each
                                              position of a key; `value_dim` where values have another width
Every rule matches arithmetic, never a module's name; what does not match stays as it was.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from llmc.compiler.checkpoint.adapter_layout import ADAPTERS
from llmc.compiler.program.fuse_attention import fuse_attention
from llmc.compiler.program.fuse_linear import fuse_gate_up, fuse_gated, fuse_qkv
from llmc.compiler.program.fuse_norms import fuse_residual, fuse_rms_norm, norm_before_transpose
from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.program.match import Matcher, either


def fuse_experts(graph: Graph) -> None:
    """Σ of the chosen experts' weighted results (frontend/experts.py) → experts, one operator a layer.

    experts(x, ids, shares, gate_up, down): [T, H] → [T, H] is Σ over the k experts e in ids[t] of
    shares[t, e] · (silu(gate) · up) · down[e]ᵀ, where gate ‖ up = x · gate_up[e]ᵀ; ids [T, k] int64, shares [T, k],
    gate_up [E, 2·I, H], down [E, H, I]. What does not match stays as `expert_linear`.
    """
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


def fuse_adapters(graph: Graph) -> None:
    """base + linear(mask[adapters] · linear(x, A), B …) → adapted(base, x, adapters, A, B …; ends)."""
    m = Matcher(graph)
    for node in graph.nodes:
        if node.op != "add":
            continue
        for added, base in zip(node.inputs, reversed(node.inputs), strict=True):
            if product := _product(m, added):
                high, low, masks = product
                ends = np.cumsum(graph.tables[masks].sum(1).astype(np.int64))
                node.op, node.attrs = "adapted", {"ends": ends.tolist()}
                node.inputs = [base, low.inputs[0], graph.inputs[ADAPTERS], low.inputs[1], *high.inputs[1:]]
                break


def _product(m: Matcher, value: Value | None) -> tuple[Node, Node, Value] | None:
    """The products with B and with A, and the table of masks, that make a value which nothing else reads."""
    high = m.made_by(value, "linear") if value is not None and m.sole(value) else None
    masked = m.made_by(high.inputs[0], "mul") if high else None
    sides = either(masked, lambda v: m.made_by(v, "index")) if masked else None
    chosen = m.made_by(sides[0], "index") if sides else None
    low = m.made_by(sides[1], "linear") if sides else None
    if high is None or chosen is None or low is None or chosen.inputs[1:] != [m.graph.inputs[ADAPTERS]]:
        return None
    table = chosen.inputs[0]
    return (high, low, table) if table in m.graph.tables else None


def merge_equal(graph: Graph) -> None:
    """Operators of equal inputs and attributes, and weights of one name → the first of them."""
    merged: dict[Value, Value] = {}
    weights: dict[str, Value] = {}
    for value, name in graph.weights.items():
        merged[value] = weights.setdefault(name, value)
    known: dict[Any, Node] = {}
    kept = []
    for node in graph.nodes:
        node.inputs = [v if v is None else merged.get(v, v) for v in node.inputs]
        first = known.setdefault((node.op, tuple(map(id, node.inputs)), repr(node.attrs)), node)
        if first is node:
            kept.append(node)
        merged |= dict(zip(node.outputs, first.outputs, strict=True))
    graph.nodes = kept
    graph.outputs = [(name, merged.get(v, v)) for name, v in graph.outputs]


def fuse(graph: Graph, gate_width: int = 0, *, adapted: bool = False) -> Graph:
    """Apply every rule in place and return the graph.

    `gate_width`: gated_linear is for gates whose width is a multiple of it; 0 for none. `adapted`: products of adapters
    are fused, too.
    """
    gate = partial(fuse_gated, gate_width=gate_width)
    for rule in (
        *((merge_equal,) if ADAPTERS in graph.inputs else ()),
        fuse_experts,
        fuse_rms_norm,
        norm_before_transpose,
        fuse_attention,
        fuse_qkv,
        fuse_gate_up,
        gate,
        *((fuse_adapters,) if adapted and ADAPTERS in graph.inputs else ()),
        fuse_residual,
        narrow_last_rows,
    ):
        rule(graph)
        graph.prune()
    return graph


_ROW_WISE = frozenset({
    "rms_norm", "skip_rms_norm", "layer_norm", "linear", "gated_linear", "split", "silu", "gelu", "relu", "tanh", "mul",
    "div", "add", "adapted",
})  # fmt: skip


def narrow_last_rows(graph: Graph) -> None:
    """Take each row's last live token before the last row-wise operators, not after: the others' results are unused.

    last_rows(f(x)) = f(last_rows(x)) for every operator f that treats tokens alike; in a decoder that moves the
    selection from the head up to the last layer's attention.
    """
    last = next((n for n in graph.nodes if n.op == "last_rows"), None)
    if last is None:
        return
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for v in node.inputs:
            if v is not None:
                readers.setdefault(v, []).append(node)
    outputs = {v for _, v in graph.outputs}
    cone: set[int] = {id(last)}
    for node in reversed(graph.nodes):
        read_by = [r for o in node.outputs for r in readers.get(o, [])]
        kept = any(o in outputs for o in node.outputs)
        by_token = all(o.shape[:2] == ("B", "Q") for o in node.outputs)
        if node.op in _ROW_WISE and by_token and read_by and not kept and all(id(r) in cone for r in read_by):
            cone.add(id(node))
    narrowed: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if id(node) not in cone:
            nodes.append(node)
            continue
        for v in node.inputs if node is not last else node.inputs[:1]:
            if v is not None and v.shape[:2] == ("B", "Q") and v not in narrowed:
                narrowed[v] = _last(v)
                nodes.append(Node("last_rows", [v, last.inputs[1]], [narrowed[v]]))
        if node is last:
            continue
        node.inputs = [narrowed.get(v, v) if v is not None else None for v in node.inputs]
        for o in node.outputs:
            narrowed[o] = _last(o)
        node.outputs = [narrowed[o] for o in node.outputs]
        nodes.append(node)
    graph.nodes = nodes
    assert last.inputs[0] is not None
    graph.substitute({last.out: narrowed[last.inputs[0]]})


def _last(v: Value) -> Value:
    return Value(f"{v.name}_last", (v.shape[0], *v.shape[2:]), v.dtype)
