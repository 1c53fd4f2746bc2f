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
                                              sin rotate the first values of a head, both None without rotation; a
                                              ninth input is sinks [Hq], a tenth [Hq, P] what scores grow by at each
                                              position of a key; `value_dim` where values have another width

Every rule matches arithmetic, never a module's name; unmatched operators stay unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from llmc.compiler.checkpoint.adapter_layout import ADAPTERS
from llmc.compiler.program.ir import Graph, Matcher, Node, Value, after_inputs, either


def fuse_attention(graph: Graph) -> None:
    """Fuse attention over [B, H, Q, D] heads, with or without a preceding rotary embedding → gqa over [B, Q, H·D]."""
    m = Matcher(graph)
    inserted: dict[int, list[Node]] = {}
    flattened: dict[str, Value] = {}
    for position, node in enumerate(graph.nodes):
        if node.op != "attention":
            continue
        query, key, value, past_k, past_v, past_lengths, *more = node.inputs
        assert query is not None
        assert key is not None
        assert value is not None
        rotary_q, rotary_k = _rotary(m, query), _rotary(m, key)
        tables: list[Value | None] = [None, None]
        if rotary_q and rotary_k and rotary_q[1:] == rotary_k[1:]:
            halves = [_half_table(graph, m, t) for t in rotary_q[1:]]
            if None not in halves:
                tables, query, key = halves, rotary_q[0], rotary_k[0]
        heads, head_dim, kv_heads = query.shape[1], query.shape[3], key.shape[1]
        built: list[Node] = []
        flat = [_flat_heads(m, v, built, flattened) for v in (query, key, value)]
        width = value.shape[3]
        out = Value(f"{node.out.name}_flat", (*node.out.shape[:2], int(heads) * int(width)), node.out.dtype)
        attrs = node.attrs | {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        if width != head_dim:
            attrs["value_dim"] = width
        inputs = [*flat, past_k, past_v, past_lengths, *tables, *(more if any(more) else [])]
        built.append(Node("gqa", inputs, [out, *node.outputs[1:]], attrs))
        built.append(Node("reshape", [out], [node.out], {"shape": list(node.out.shape)}))
        inserted[position] = built
    graph.nodes = [n for i, old in enumerate(graph.nodes) for n in inserted.get(i, [old])]
    _drop_inverse_reshapes(graph)


def _rotary(m: Matcher, value: Value) -> tuple[Value, Value, Value] | None:
    """(x, cos, sin) when value = x·cos + rotate_half(x)·sin, or only the first part of x is rotated. Some models rotate
    [B, Q, H, D]; x is then the transpose of the rotated tensor."""
    turned = m.built_by(value, "transpose")
    if turned is not None and {turned.attrs["dim0"], turned.attrs["dim1"]} == {1, 2}:
        by_token = turned.inputs[0]
        found = _rotary(m, by_token) if by_token is not None else None
        if found is None:
            return None
        by_head = Value(f"{found[0].name}_by_head", value.shape, value.dtype)
        m.producers[by_head] = Node("transpose", [found[0]], [by_head], dict(turned.attrs))
        return by_head, *found[1:]
    cat = m.built_by(value, "cat")
    if cat is None:
        return _whole_rotary(m, value)
    if len(cat.inputs) != 2 or cat.attrs.get("dim", 0) not in (-1, 3) or cat.inputs[0] is None:
        return None
    found = _whole_rotary(m, cat.inputs[0])
    if cat.inputs[1] is not None and cat.inputs[1].shape[3] == 0:
        return found
    parts = [m.built_by(v, "slice") for v in ((found and found[0]), cat.inputs[1])]
    if found is None or parts[0] is None or parts[1] is None or parts[0].inputs[0] is not parts[1].inputs[0]:
        return None
    x, width = parts[0].inputs[0], int(found[0].shape[3])
    assert x is not None
    if _bounds(parts[0], x) != (0, width) or _bounds(parts[1], x) != (width, int(x.shape[3])):
        return None
    return x, found[1], found[2]


def _bounds(node: Node, x: Value) -> tuple[int, int] | None:
    """Begin and end of a slice of the last axis of `x` [B, H, Q, D]; None for another axis."""
    if node.attrs.get("dim", 0) not in (-1, 3) or node.attrs.get("step", 1) != 1:
        return None
    start, end = node.attrs.get("start") or 0, node.attrs.get("end")
    return start, int(x.shape[3]) if end is None else min(end, int(x.shape[3]))


def _whole_rotary(m: Matcher, value: Value) -> tuple[Value, Value, Value] | None:
    total = m.built_by(value, "add")
    if total is None or len(total.inputs) != 2:
        return None
    for plain, turned in (total.inputs, total.inputs[::-1]):
        a, b = m.built_by(plain, "mul"), m.built_by(turned, "mul")
        first = either(a, lambda v: m.built_by(v, "position_table")) if a else None
        second = either(b, lambda v: m.built_by(v, "position_table")) if b else None
        if first and second and _is_rotated_half(m, second[1], first[1]):
            return first[1], first[0], second[0]
    return None


def _is_rotated_half(m: Matcher, rotated: Value, x: Value) -> bool:
    """rotated == concat(−x[D/2:], x[:D/2]) on the last axis."""
    cat = m.built_by(rotated, "cat")
    if cat is None or len(cat.inputs) != 2 or cat.attrs.get("dim", 0) not in (-1, 3):
        return False
    negated = m.built_by(cat.inputs[0], "neg")
    upper = m.built_by(negated.inputs[0], "slice") if negated else None
    lower = m.built_by(cat.inputs[1], "slice")
    if upper is None or lower is None or upper.inputs[0] is not x or lower.inputs[0] is not x:
        return False
    half, whole = int(x.shape[3]) // 2, int(x.shape[3])
    return _bounds(upper, x) == (half, whole) and _bounds(lower, x) == (0, half)


def _half_table(graph: Graph, m: Matcher, value: Value) -> Value | None:
    """The [P, D/2] table behind a position_table value whose two halves are equal, or None."""
    full = m.producers[value].inputs[0]
    assert full is not None
    name = f"{full.name}_half"
    for known in graph.tables:
        if known.name == name:
            return known
    array = graph.tables[full]
    half = array.shape[1] // 2
    if not np.array_equal(array[:, :half], array[:, half:]):
        return None
    table = Value(name, (array.shape[0], half), "float32")
    graph.tables[table] = np.ascontiguousarray(array[:, :half])
    return table


def _flat_heads(m: Matcher, value: Value, built: list[Node], known: dict[str, Value]) -> Value:
    """[B, H, Q, D] → the [B, Q, H·D] tensor it was built from, or a reshape of it. `known` holds the results of earlier
    attentions by name, because some layers read the keys of another layer."""
    transposed = m.built_by(value, "transpose")
    if transposed is not None and {transposed.attrs["dim0"], transposed.attrs["dim1"]} == {1, 2}:
        source = transposed.inputs[0]
        assert source is not None
    else:
        batch, heads, query, head_dim = value.shape
        name = f"{value.name}_by_token"
        if name not in known:
            known[name] = Value(name, (batch, query, heads, head_dim), value.dtype)
            built.append(Node("transpose", [value], [known[name]], {"dim0": 1, "dim1": 2}))
        source = known[name]
    batch, query, heads, head_dim = source.shape
    flat_shape = (batch, query, int(heads) * int(head_dim))
    viewed = m.built_by(source, "view", "reshape")
    if viewed is not None and viewed.inputs[0] is not None and viewed.inputs[0].shape == flat_shape:
        return viewed.inputs[0]
    name = f"{source.name}_flat"
    if name not in known:
        known[name] = Value(name, flat_shape, source.dtype)
        built.append(Node("reshape", [source], [known[name]], {"shape": list(flat_shape)}))
    return known[name]


def _drop_inverse_reshapes(graph: Graph) -> None:
    """reshape(reshape(x)) to x's own shape → x."""
    producers = graph.producers()
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.op in ("reshape", "view") and (before := producers.get(node.inputs[0])) is not None:  # type: ignore[arg-type]
            source = before.inputs[0] if before.op in ("reshape", "view") else None
            if source is not None and source.shape == node.out.shape:
                replaced[node.out] = source
    graph.substitute(replaced)


def fuse_qkv(graph: Graph) -> None:
    """Fuse gqa over three linears of one input → gqa over one packed linear, also where each is a sum of two."""
    m = Matcher(graph)
    added: dict[int, list[Node]] = {}
    for i, node in enumerate(graph.nodes):
        if node.op != "gqa":
            continue
        packed = _packed(m, node.inputs[:3], f"qkv_{node.out.name}")
        if packed:
            node.inputs[:3] = [packed[-1].out, None, None]
            added[i] = [*packed, node]
    graph.nodes = [n for i, old in enumerate(graph.nodes) for n in added.get(i, [old])]


def fuse_gate_up(graph: Graph) -> None:
    """Fuse silu(linear(x, gate)) · linear(x, up) → one linear, split in two, also where each is a sum of two."""
    m = Matcher(graph)
    added: dict[int, list[Node]] = {}
    index = {id(n): i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "mul" or (pair := either(node, lambda v: m.built_by(v, "silu", "gelu"))) is None:
            continue
        gate, up = m.producers[pair[0]].inputs[0], pair[1]
        packed = _packed(m, [gate, up], f"gate_up_{node.out.name}")
        if not packed or gate is None:
            continue
        parts = [int(v.shape[-1]) for v in (gate, up)]
        halves = Node("split", [packed[-1].out], [gate, up], {"parts": parts})
        first, last = sorted(index[id(m.producers[v])] for v in (gate, up))
        added[first], added[last] = [*packed, halves], []
    graph.nodes = [n for i, old in enumerate(graph.nodes) for n in added.get(i, [old])]


def fuse_gated(graph: Graph, gate_width: int) -> None:
    """Fuse silu(a) · b of a split linear without biases → gated_linear."""
    m = Matcher(graph)
    for node in graph.nodes:
        if not gate_width or node.op != "mul" or (pair := either(node, lambda v: m.built_by(v, "silu"))) is None:
            continue
        gate = m.producers[pair[0]].inputs[0]
        halves = m.built_by(gate, "split")
        both = m.built_by(halves.inputs[0], "linear") if halves else None
        if halves is None or both is None or halves.outputs != [gate, pair[1]]:
            continue
        if len(both.inputs) == 3 and all(w % gate_width == 0 for w in both.attrs["parts"]):
            node.op, node.inputs, node.attrs = "gated_linear", both.inputs, both.attrs


def _packed(m: Matcher, values: Sequence[Value | None], name: str) -> list[Node]:
    """Nodes that compute `values` concatenated, the last node all of them: a linear over their concatenated weights, or
    the sum of two such linears. Empty where alike linears do not compute them, or other nodes read them."""
    if not all(v is not None and m.sole(v) for v in values):
        return []
    sums = [m.built_by(v, "add") for v in values]
    if not any(sums):
        linears = [m.built_by(v, "linear") for v in values]
        return [_concat_linears([n for n in linears if n], name)] if _alike(linears) else []
    sides = [[m.built_by(total.optional(at), "linear") if total else None for total in sums] for at in (0, 1)]
    if not all(_alike(side) and all(n and m.sole(n.out) for n in side) for side in sides):
        return []
    built = [_concat_linears([n for n in side if n], f"{name}_{at}") for at, side in enumerate(sides)]
    first = built[0].out
    return [*built, Node("add", [n.out for n in built], [Value(name, first.shape, first.dtype)])]


def _concat_linears(nodes: list[Node], name: str) -> Node:
    """One linear over the concatenated weights (and biases) of `nodes`, which read the same input."""
    widths = [int(n.out.shape[-1]) for n in nodes]
    out = Value(name, (*nodes[0].out.shape[:-1], sum(widths)), nodes[0].out.dtype)
    weights = [n.inputs[1] for n in nodes]
    biases = [n.inputs[2] for n in nodes if len(n.inputs) > 2 and n.inputs[2] is not None]
    return Node("linear", [nodes[0].inputs[0], *weights, *biases], [out], {"parts": widths})


def _alike(nodes: list[Node | None]) -> bool:
    """Linears of one input, all with a bias or all without."""
    first = nodes[0]
    return first is not None and all(
        n is not None and n.inputs[0] is first.inputs[0] and len(_bias(n)) == len(_bias(first)) for n in nodes
    )


def _bias(node: Node) -> list[Value]:
    return [v for v in node.inputs[2:] if v is not None]


def fuse_rms_norm(graph: Graph) -> None:
    """Fuse weight · (x · rsqrt(mean(x²) + eps)) → rms_norm; a number may be added to the weight."""
    m = Matcher(graph)

    def is_weight(value: Value) -> bool:
        raised = m.built_by(value, "add")
        return value in graph.weights or bool(raised and "other" in raised.attrs and raised.inputs[0] in graph.weights)

    def is_root(value: Value) -> bool:
        power = m.built_by(value, "rsqrt", "pow")
        return power is not None and (power.op == "rsqrt" or power.attrs.get("exponent") == -0.5)

    for node in graph.nodes:
        if node.op != "mul" or (pair := either(node, is_weight)) is None:
            continue
        weight, scaled = pair
        inner = m.built_by(scaled, "mul")
        found = either(inner, is_root) if inner else None
        if found is None or len(weight.shape) != 1:
            continue
        root, x = found
        eps = _mean_square_eps(m, m.producers[root].inputs[0], x)
        if eps is not None:
            node.op, node.inputs, node.attrs = "rms_norm", [x, weight], {"eps": eps}


def _mean_square_eps(m: Matcher, value: Value | None, x: Value) -> float | None:
    added = m.built_by(value, "add")
    mean = m.built_by(added.inputs[0], "mean") if added and "other" in added.attrs else None
    power = m.built_by(mean.inputs[0], "pow") if mean else None
    if added is None or mean is None or power is None or mean.attrs.get("dim") != [-1]:
        return None
    if power.attrs.get("exponent") != 2 or power.inputs[0] is not x:
        return None
    return float(added.attrs["other"])


def norm_before_transpose(graph: Graph) -> None:
    """Rewrite rms_norm(transpose(x)) → transpose(rms_norm(x)), where the last axis stays: heads keep token order
    longer."""
    m = Matcher(graph)
    for node in graph.nodes:
        turned = m.built_by(node.inputs[0], "transpose") if node.op == "rms_norm" else None
        if turned is None or not m.sole(turned.out) or {turned.attrs["dim0"], turned.attrs["dim1"]} != {1, 2}:
            continue
        source = turned.inputs[0]
        assert source is not None
        normed = Value(f"{node.out.name}_by_token", source.shape, source.dtype)
        graph.nodes[graph.nodes.index(node)] = Node("transpose", [normed], [node.out], dict(turned.attrs))
        graph.nodes[graph.nodes.index(turned)] = Node("rms_norm", [source, *node.inputs[1:]], [normed], node.attrs)
    graph.nodes = after_inputs(graph.nodes)


def fuse_residual(graph: Graph) -> None:
    """Fuse rms_norm(x + y) → skip_rms_norm, which also yields x + y, where that is hidden states [B, Q, H]: a sum of
    heads [B, H, Q, D] is a rotary embedding's."""
    m = Matcher(graph)
    fused: set[int] = set()
    for node in graph.nodes:
        if node.op != "rms_norm":
            continue
        total = m.built_by(node.inputs[0], "add")
        if total is None or len(total.inputs) != 2 or id(total) in fused or total.attrs.get("alpha", 1) != 1:
            continue
        if len(total.out.shape) > 3 or any(v is None or v.shape != total.out.shape for v in total.inputs):
            continue
        fused.add(id(total))
        node.op, node.inputs = "skip_rms_norm", [*total.inputs, node.inputs[1]]
        node.outputs = [node.out, total.out]
    graph.nodes = after_inputs([n for n in graph.nodes if id(n) not in fused])


def fuse_experts(graph: Graph) -> None:
    """Fuse Σ of the chosen experts' weighted results (frontend/traceable.py) → experts, one operator per layer.

    experts(x, ids, shares, gate_up, down): [T, H] → [T, H] is Σ over the k experts e in ids[t] of shares[t, e] ·
    (silu(gate) · up) · down[e]ᵀ, where gate ‖ up = x · gate_up[e]ᵀ; ids [T, k] int64, shares [T, k], gate_up [E, 2·I,
    H], down [E, H, I]. Unmatched operators stay `expert_linear`.
    """
    m = Matcher(graph)
    for node in graph.nodes:
        inputs = _experts(m, node)
        if inputs is not None:
            node.op, node.inputs, node.attrs = "experts", inputs, {}


def _experts(m: Matcher, node: Node) -> list[Value | None] | None:
    weighted = m.built_by(node.inputs[0], "mul") if node.op == "sum" and node.attrs.get("dim") == [1] else None
    if weighted is None or node.attrs.get("keepdim") or len(weighted.inputs) != 2:
        return None
    down = m.built_by(weighted.inputs[0], "expert_linear")
    shares = m.built_by(weighted.inputs[1], "unsqueeze")
    gated = m.built_by(down.inputs[0], "mul") if down else None
    if down is None or shares is None or gated is None or len(gated.inputs) != 2 or shares.attrs["dim"] not in (2, -1):
        return None
    silu = m.built_by(gated.inputs[0], "silu")
    halves = m.built_by(silu.inputs[0], "chunk", "split") if silu else None
    into = m.built_by(halves.inputs[0], "expert_linear") if halves else None
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
    """Fuse base + linear(mask[adapters] · linear(x, A), B …) → adapted(base, x, adapters, A, B …; ends)."""
    m = Matcher(graph)
    for node in graph.nodes:
        if node.op != "add":
            continue
        for added, base in zip(node.inputs, reversed(node.inputs), strict=True):
            if product := _matmul(m, added):
                high, low, masks = product
                ends = np.cumsum(graph.tables[masks].sum(1).astype(np.int64))
                node.op, node.attrs = "adapted", {"ends": ends.tolist()}
                node.inputs = [base, low.inputs[0], graph.inputs[ADAPTERS], low.inputs[1], *high.inputs[1:]]
                break


def _matmul(m: Matcher, value: Value | None) -> tuple[Node, Node, Value] | None:
    """The matmuls with B and with A, and the mask table, of a value that has one reader."""
    high = m.built_by(value, "linear") if value is not None and m.sole(value) else None
    masked = m.built_by(high.inputs[0], "mul") if high else None
    sides = either(masked, lambda v: m.built_by(v, "index")) if masked else None
    chosen = m.built_by(sides[0], "index") if sides else None
    low = m.built_by(sides[1], "linear") if sides else None
    if high is None or chosen is None or low is None or chosen.inputs[1:] != [m.graph.inputs[ADAPTERS]]:
        return None
    table = chosen.inputs[0]
    return (high, low, table) if table in m.graph.tables else None


def merge_equal(graph: Graph) -> None:
    """Replace operators of equal inputs and attributes, and weights of one name, by the first of them."""
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
    """Apply every rule in place. `gate_width`: gated_linear is for gates whose width is a multiple of it; 0 for none.
    `adapted`: also fuse the matmuls of adapters."""
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
    """Select each row's last live token before the last row-wise operators: last_rows(f(x)) = f(last_rows(x)) for every
    operator f that treats tokens alike. That moves the selection from the lm_head up to the last layer's attention."""
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
