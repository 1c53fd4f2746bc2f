"""Products of one input as one product, and gates (fuse.py says what they compute)."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.program.match import Matcher, either


def fuse_qkv(graph: Graph) -> None:
    """gqa over three linears of one input → gqa over one packed linear; so where each is a sum of two."""
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
    """silu(linear(x, gate)) · linear(x, up) → one linear, split in two; so where each is a sum of two."""
    m = Matcher(graph)
    added: dict[int, list[Node]] = {}
    index = {id(n): i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "mul" or (pair := either(node, lambda v: m.made_by(v, "silu", "gelu"))) is None:
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
    """silu(a) · b of a split linear without biases → gated_linear."""
    m = Matcher(graph)
    for node in graph.nodes:
        if not gate_width or node.op != "mul" or (pair := either(node, lambda v: m.made_by(v, "silu"))) is None:
            continue
        gate = m.producers[pair[0]].inputs[0]
        halves = m.made_by(gate, "split")
        both = m.made_by(halves.inputs[0], "linear") if halves else None
        if halves is None or both is None or halves.outputs != [gate, pair[1]]:
            continue
        if len(both.inputs) == 3 and all(w % gate_width == 0 for w in both.attrs["parts"]):
            node.op, node.inputs, node.attrs = "gated_linear", both.inputs, both.attrs


def _packed(m: Matcher, values: Sequence[Value | None], name: str) -> list[Node]:
    """What makes `values` side by side, the last node all of them: a linear over the concatenated weights of theirs, or
    the sum of two such. None where they are not made by alike linears, and read elsewhere, too."""
    if not all(v is not None and m.sole(v) for v in values):
        return []
    sums = [m.made_by(v, "add") for v in values]
    if not any(sums):
        linears = [m.made_by(v, "linear") for v in values]
        return [_concat_linears([n for n in linears if n], name)] if _alike(linears) else []
    sides = [[m.made_by(total.optional(at), "linear") if total else None for total in sums] for at in (0, 1)]
    if not all(_alike(side) and all(n and m.sole(n.out) for n in side) for side in sides):
        return []
    made = [_concat_linears([n for n in side if n], f"{name}_{at}") for at, side in enumerate(sides)]
    first = made[0].out
    return [*made, Node("add", [n.out for n in made], [Value(name, first.shape, first.dtype)])]


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
