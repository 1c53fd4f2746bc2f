"""Operators that compute the same, as one: modules of one input hold the same matrix of their adapters."""

from __future__ import annotations

from typing import Any

from llmc.compiler.program.ir import Graph, Node, Value


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
