"""Demand on a plan: the steps of real traffic and their frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Points = NDArray[np.int64]
"""Steps or buckets, one a row, one dimension a column: batch, query, context or some of them."""

Costs = NDArray[np.float64]
"""One cost or weight a row of `Points`."""


@dataclass(frozen=True, init=False, eq=False)
class Demand:
    """Distinct steps in ascending order, each with its weight above 0.

    points   int64 [n, d]: the sizes that a bucket must reach in every dimension to serve the step
    weights  float64 [n]: how often the step happens, in any unit

    Equal steps are merged, and steps of weight 0 are dropped; the result does not depend on the order of the input.
    """

    points: Points
    weights: Costs

    def __init__(self, points: ArrayLike, weights: ArrayLike) -> None:
        table, counts = np.asarray(points, np.int64), np.asarray(weights, np.float64)
        order = np.lexsort((counts, *table.T[::-1]))
        order = order[counts[order] > 0]
        table, counts = merged(table[order], counts[order])
        for array in (table, counts):
            array.setflags(write=False)
        object.__setattr__(self, "points", table)
        object.__setattr__(self, "weights", counts)


def merged(rows: Points, weights: Costs) -> tuple[Points, Costs]:
    """Return ascending `rows` without repetition, each with the sum of its weights."""
    first = np.ones(len(rows), bool)
    first[1:] = (rows[1:] != rows[:-1]).any(1)
    return rows[first], np.add.reduceat(weights, np.flatnonzero(first)) if len(weights) else weights


def name(point: Points) -> str:
    """Return a point in message form: (4, 512)."""
    return f"({', '.join(str(int(value)) for value in point)})"


def sums(groups: NDArray[np.int64], amounts: Costs, size: int = 0) -> Costs:
    """Return the sum of the amounts of each group 0, 1, 2 …, at least `size` of them."""
    totals: Costs = np.bincount(groups, amounts, size).astype(np.float64, copy=False)
    return totals
