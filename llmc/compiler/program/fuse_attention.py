"""Attention of a traced graph, and the rotary embedding before it, as one operator (fuse.py says what it computes)."""

from __future__ import annotations

import numpy as np

from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.program.match import Matcher, either


def fuse_attention(graph: Graph) -> None:
    """Attention over [B, H, Q, D] heads, with or without rotary embedding before it → gqa over [B, Q, H·D]."""
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
        made: list[Node] = []
        flat = [_flat_heads(m, v, made, flattened) for v in (query, key, value)]
        width = value.shape[3]
        out = Value(f"{node.out.name}_flat", (*node.out.shape[:2], int(heads) * int(width)), node.out.dtype)
        attrs = node.attrs | {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        if width != head_dim:
            attrs["value_dim"] = width
        inputs = [*flat, past_k, past_v, past_lengths, *tables, *(more if any(more) else [])]
        made.append(Node("gqa", inputs, [out, *node.outputs[1:]], attrs))
        made.append(Node("reshape", [out], [node.out], {"shape": list(node.out.shape)}))
        inserted[position] = made
    graph.nodes = [n for i, old in enumerate(graph.nodes) for n in inserted.get(i, [old])]
    _drop_inverse_reshapes(graph)


def _rotary(m: Matcher, value: Value) -> tuple[Value, Value, Value] | None:
    """(x, cos, sin) when value = x·cos + rotate_half(x)·sin, or so of the first part of x, with the rest beside it.

    Some models rotate [B, Q, H, D]. Then x is what a transposition of what they rotate would be.
    """
    turned = m.made_by(value, "transpose")
    if turned is not None and {turned.attrs["dim0"], turned.attrs["dim1"]} == {1, 2}:
        by_token = turned.inputs[0]
        found = _rotary(m, by_token) if by_token is not None else None
        if found is None:
            return None
        by_head = Value(f"{found[0].name}_by_head", value.shape, value.dtype)
        m.producers[by_head] = Node("transpose", [found[0]], [by_head], dict(turned.attrs))
        return by_head, *found[1:]
    cat = m.made_by(value, "cat")
    if cat is None:
        return _whole_rotary(m, value)
    if len(cat.inputs) != 2 or cat.attrs.get("dim", 0) not in (-1, 3) or cat.inputs[0] is None:
        return None
    found = _whole_rotary(m, cat.inputs[0])
    if cat.inputs[1] is not None and cat.inputs[1].shape[3] == 0:
        return found
    parts = [m.made_by(v, "slice") for v in ((found and found[0]), cat.inputs[1])]
    if found is None or parts[0] is None or parts[1] is None or parts[0].inputs[0] is not parts[1].inputs[0]:
        return None
    x, width = parts[0].inputs[0], int(found[0].shape[3])
    assert x is not None
    if _bounds(parts[0], x) != (0, width) or _bounds(parts[1], x) != (width, int(x.shape[3])):
        return None
    return x, found[1], found[2]


def _bounds(node: Node, x: Value) -> tuple[int, int] | None:
    """Where a slice of the last axis of `x` [B, H, Q, D] begins and ends; None for one of another axis."""
    if node.attrs.get("dim", 0) not in (-1, 3) or node.attrs.get("step", 1) != 1:
        return None
    start, end = node.attrs.get("start") or 0, node.attrs.get("end")
    return start, int(x.shape[3]) if end is None else min(end, int(x.shape[3]))


def _whole_rotary(m: Matcher, value: Value) -> tuple[Value, Value, Value] | None:
    total = m.made_by(value, "add")
    if total is None or len(total.inputs) != 2:
        return None
    for plain, turned in (total.inputs, total.inputs[::-1]):
        a, b = m.made_by(plain, "mul"), m.made_by(turned, "mul")
        first = either(a, lambda v: m.made_by(v, "position_table")) if a else None
        second = either(b, lambda v: m.made_by(v, "position_table")) if b else None
        if first and second and _is_rotated_half(m, second[1], first[1]):
            return first[1], first[0], second[0]
    return None


def _is_rotated_half(m: Matcher, rotated: Value, x: Value) -> bool:
    """rotated == concat(−x[D/2:], x[:D/2]) on the last axis."""
    cat = m.made_by(rotated, "cat")
    if cat is None or len(cat.inputs) != 2 or cat.attrs.get("dim", 0) not in (-1, 3):
        return False
    negated = m.made_by(cat.inputs[0], "neg")
    upper = m.made_by(negated.inputs[0], "slice") if negated else None
    lower = m.made_by(cat.inputs[1], "slice")
    if upper is None or lower is None or upper.inputs[0] is not x or lower.inputs[0] is not x:
        return False
    half, whole = int(x.shape[3]) // 2, int(x.shape[3])
    return _bounds(upper, x) == (half, whole) and _bounds(lower, x) == (0, half)


def _half_table(graph: Graph, m: Matcher, value: Value) -> Value | None:
    """The [P, D/2] table behind a position_table value whose two halves repeat each other; None for another one."""
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


def _flat_heads(m: Matcher, value: Value, made: list[Node], known: dict[str, Value]) -> Value:
    """[B, H, Q, D] → the [B, Q, H·D] tensor it was made from, or a reshape of it; `known` are those that earlier
    attentions made, by name: some read the keys of another layer."""
    transposed = m.made_by(value, "transpose")
    if transposed is not None and {transposed.attrs["dim0"], transposed.attrs["dim1"]} == {1, 2}:
        source = transposed.inputs[0]
        assert source is not None
    else:
        batch, heads, query, head_dim = value.shape
        name = f"{value.name}_by_token"
        if name not in known:
            known[name] = Value(name, (batch, query, heads, head_dim), value.dtype)
            made.append(Node("transpose", [value], [known[name]], {"dim0": 1, "dim1": 2}))
        source = known[name]
    batch, query, heads, head_dim = source.shape
    flat_shape = (batch, query, int(heads) * int(head_dim))
    viewed = m.made_by(source, "view", "reshape")
    if viewed is not None and viewed.inputs[0] is not None and viewed.inputs[0].shape == flat_shape:
        return viewed.inputs[0]
    name = f"{source.name}_flat"
    if name not in known:
        known[name] = Value(name, flat_shape, source.dtype)
        made.append(Node("reshape", [source], [known[name]], {"shape": list(flat_shape)}))
    return known[name]


def _drop_inverse_reshapes(graph: Graph) -> None:
    """reshape(reshape(x)) with x's own shape → x."""
    producers = graph.producers()
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.op in ("reshape", "view") and (before := producers.get(node.inputs[0])) is not None:  # type: ignore[arg-type]
            source = before.inputs[0] if before.op in ("reshape", "view") else None
            if source is not None and source.shape == node.out.shape:
                replaced[node.out] = source
    graph.substitute(replaced)
