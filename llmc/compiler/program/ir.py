"""The graph language between the traced program and a target: single assignment, no weights, no framework.

A `Value` is a tensor with a name, a dtype and a shape. Dimensions are ints, or strings with expressions in the symbols
B (batch), Q (new tokens per row) and S (cache length). A `Node` applies an operator to its inputs. Operators have the
names of ATen without the overload (`linear`, `mul`, `silu` …), or are the fused operators of `fuse.py`. Weights are
values listed in `Graph.weights`; computed tables are in `Graph.tables`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Dim: TypeAlias = "int | str"


@dataclass(eq=False, frozen=True)
class Value:
    """A tensor, compared by identity."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(eq=False)
class Node:
    """One operator application; `inputs` may hold None for an absent optional input."""

    op: str
    inputs: list[Value | None]
    outputs: list[Value]
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def out(self) -> Value:
        """The first output."""
        return self.outputs[0]

    @property
    def given(self) -> list[Value]:
        """The inputs that are not absent."""
        return [value for value in self.inputs if value is not None]

    def value(self, at: int) -> Value:
        """The input at index `at`. Raises ValueError where it is absent."""
        if (found := self.inputs[at]) is None:
            raise ValueError(f"{self} lacks its input {at}")
        return found

    def optional(self, at: int) -> Value | None:
        """The input at index `at`, or None where it is absent or out of range."""
        return self.inputs[at] if at < len(self.inputs) else None

    def __str__(self) -> str:
        attrs = "".join(f", {k}={v}" for k, v in self.attrs.items())
        outs = ", ".join(f"{o}: {o.dtype}[{','.join(map(str, o.shape))}]" for o in self.outputs)
        return f"{outs} = {self.op}({', '.join(map(str, self.inputs))}{attrs})"


@dataclass
class Graph:
    """A program: `inputs` and `outputs` by contract (frontend/trace.py), nodes in topological order."""

    inputs: dict[str, Value]
    outputs: list[tuple[str, Value]]
    nodes: list[Node]
    weights: dict[Value, str]
    tables: dict[Value, NDArray[np.float32]]

    def producers(self) -> dict[Value, Node]:
        """The node that computes each value."""
        return {o: n for n in self.nodes for o in n.outputs}

    def uses(self) -> Counter[Value]:
        """Read count of each value, by nodes and as an output."""
        counts: Counter[Value] = Counter(v for _, v in self.outputs)
        counts.update(v for n in self.nodes for v in n.inputs if v is not None)
        return counts

    def substitute(self, replaced: dict[Value, Value]) -> None:
        """Replace reads of each key by its value, following chains."""

        def final(v: Value) -> Value:
            while v in replaced:
                v = replaced[v]
            return v

        for node in self.nodes:
            node.inputs = [v if v is None else final(v) for v in node.inputs]
        self.outputs = [(name, final(v)) for name, v in self.outputs]

    def prune(self) -> None:
        """Drop nodes, weights and tables that no output needs."""
        needed = {v for _, v in self.outputs}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if any(o in needed for o in node.outputs):
                kept.append(node)
                needed.update(v for v in node.inputs if v is not None)
        self.nodes = kept[::-1]
        self.weights = {v: n for v, n in self.weights.items() if v in needed}
        self.tables = {v: t for v, t in self.tables.items() if v in needed}

    def lines(self) -> Iterator[str]:
        """The graph as text, one node a line, for keys and readers."""
        for name, v in self.inputs.items():
            yield f"input {name}: {v.dtype}[{','.join(map(str, v.shape))}]"
        for v, name in self.weights.items():
            yield f"weight {v} = {name}: [{','.join(map(str, v.shape))}]"
        for v in self.tables:
            yield f"table {v}: [{','.join(map(str, v.shape))}]"
        yield from map(str, self.nodes)
        for name, v in self.outputs:
            yield f"output {name} = {v}"

    def text(self) -> str:
        """The graph as one text."""
        return "\n".join(self.lines()) + "\n"


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
