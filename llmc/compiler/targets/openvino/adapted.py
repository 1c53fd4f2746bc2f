"""What adapters that requests choose add to products, in as few nodes as OpenVINO can run it.

    y = W x + bias + B (mask ⊙ A x) = [W B] [x; mask ⊙ A x] + bias

The right side has one large product less, and no sum: on a CPU a step of few rows waits for each product to begin. It
is taken where one form holds W and B: floats, and 8 bits in groups that end where W's columns do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from openvino import opset13 as ops

from llmc.compiler.program.match import Matcher
from llmc.compiler.targets.openvino.plain import Building

if TYPE_CHECKING:
    from llmc.compiler.program.ir import Graph, Node, Value
    from llmc.compiler.targets.openvino.formats import WeightFormat


class Multiplying(Building, Protocol):
    """A model that multiplies by weights (graph_model.py)."""

    masks: dict[tuple[Value, str], Any]
    """Of adapters' ranks, by what chooses them."""

    def product(
        self, x: Any, matrices: Sequence[Value | None], biases: Sequence[Value | None] = (),
        beside: Sequence[Value | None] = (),
    ) -> Any:  # fmt: skip
        """x · concat(matrices)ᵀ + concat(biases), each matrix with the columns of one of `beside` behind its own."""


def widened(graph: Graph, weights: WeightFormat) -> dict[Node, Node]:
    """Nodes `adapted` whose product takes B's columns beside its own, each with the node of that product."""
    m, found = Matcher(graph), {}
    for node in graph.nodes:
        if node.op == "adapted":
            base, low, high = node.inputs[0], node.inputs[3], node.inputs[4:]
            product = m.made_by(base, "linear") if base is not None and m.sole(base) else None
            if product is None or product.inputs[0] is not node.inputs[1]:
                continue
            matrices = product.inputs[1 : 1 + len(high)]
            assert low is not None
            rows, width = (int(d) for d in low.shape)
            if [_rows(v) for v in matrices] == [_rows(v) for v in high] and weights.holds_beside(width, rows):
                found[node] = product
    return found


def emit_adapted(to: Multiplying, node: Node, product: Node | None) -> Any:
    """`product`: the one that takes B's columns, if one does."""
    base, x, adapters, low, *high = node.inputs
    assert low is not None
    chosen = ops.multiply(to.product(to.get(x), [low]), _mask(to, adapters, int(low.shape[0]), node.attrs["ends"]))
    if product is None:
        return ops.add(to.get(base), to.product(chosen, high))
    matrices, biases = product.inputs[1 : 1 + len(high)], product.inputs[1 + len(high) :]
    return to.product(ops.concat([to.get(x), chosen], -1), matrices, biases, beside=high)


def _rows(value: Value | None) -> int:
    return 0 if value is None else int(value.shape[0])


def _mask(to: Multiplying, adapters: Value | None, ranks: int, ends: list[int]) -> Any:
    """1 at the ranks of each token's adapter, [T, R]."""
    assert adapters is not None
    name = f"ranks_{ranks}_{'_'.join(map(str, ends))}"
    if (adapters, name) not in to.masks:
        table = np.zeros((len(ends), ranks), np.float32)
        for number, (begin, end) in enumerate(pairwise(ends), 1):
            table[number, begin:end] = 1
        chosen = ops.gather(to.constants.table(name, table), to.get(adapters), to.constants.small(0))
        to.masks[adapters, name] = chosen
    return to.masks[adapters, name]
