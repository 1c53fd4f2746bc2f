"""Steps of a server, counted by shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmc.buckets.servers.base import Demand, Shape

Demands = Mapping[str, Mapping[Shape, Demand]]
"""Family to shape to all steps of that shape, in the order in which the shapes first came."""


def collect(demands: Iterable[Demand]) -> dict[str, dict[Shape, Demand]]:
    """`demands` with those of one shape added up; memory grows with distinct shapes, not with steps."""
    steps: dict[str, dict[Shape, list[int]]] = {}
    for family, shape, count, real in demands:
        known = steps.setdefault(family, {}).setdefault(shape, [0, 0])
        known[0] += count
        known[1] += real
    return {
        family: {shape: Demand(family, shape, count, real) for shape, (count, real) in shapes.items()}
        for family, shapes in steps.items()
    }
