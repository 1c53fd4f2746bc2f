"""What a row's LoRA adapter adds to a product, as one operator that knows which ranks the adapter has."""

from __future__ import annotations

import numpy as np

from llmc.compiler.checkpoint.adapter_layout import ADAPTERS
from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.program.match import Matcher, either


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
