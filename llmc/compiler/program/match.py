"""Shared helpers of fusion rules: producers and readers of a value, and the order of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from llmc.compiler.program.ir import Graph, Node, Value


class Matcher:
    """Producer look-ups over one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.uses: Counter[Value] = graph.uses()

    def built_by(self, value: Value | None, *ops: str) -> Node | None:
        """The node that computes `value`, if it is one of `ops`."""
        node = self.producers.get(value) if value is not None else None
        return node if node is not None and node.op in ops else None

    def sole(self, value: Value) -> bool:
        """Whether `value` has exactly one reader."""
        return self.uses[value] == 1


def either(node: Node, predicate: Callable[[Value], object]) -> tuple[Value, Value] | None:
    """For a commutative node: (the operand that satisfies `predicate`, the other one)."""
    if len(node.inputs) != 2:
        return None
    a, b = node.inputs
    if a is None or b is None:
        return None
    if predicate(a):
        return a, b
    return (b, a) if predicate(b) else None


def after_inputs(nodes: list[Node]) -> list[Node]:
    """Stable topological order, for when a fused node took over an earlier node's output."""
    built_by = {o: n for n in nodes for o in n.outputs}
    ordered: list[Node] = []
    done: set[int] = set()

    def visit(node: Node) -> None:
        stack = [node]
        while stack:
            top = stack[-1]
            if id(top) in done:
                stack.pop()
                continue
            missing = [built_by[v] for v in top.inputs if v in built_by and id(built_by[v]) not in done]
            if missing:
                stack.extend(missing)
            else:
                done.add(id(top))
                ordered.append(stack.pop())

    for node in nodes:
        visit(node)
    return ordered
