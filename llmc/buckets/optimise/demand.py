"""The demand on a plan: the steps of real traffic and their frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmc.errors import InputError

Points = NDArray[np.int64]
"""Steps or buckets, one a row, one dimension a column: batch, query, context or some of them."""

Costs = NDArray[np.float64]
"""One cost or weight a row of `Points`."""

MAX_VALUE = 1 << 31
"""Above every batch and length that is accepted."""


@dataclass(frozen=True, init=False, eq=False)
class Demand:
    """Distinct steps in ascending order, each with its weight above 0.

    points     int64 [n, d]: what a bucket must reach in every dimension to serve the step
    weights    float64 [n]: how often the step happens, in any unit

    Equal steps are merged, and steps of weight 0 are left out, since they never happen; the result does not depend on
    the order in which the steps are given. Raises InputError for points that are no table of 1 to 3 columns of
    integers from 0 to 2³¹ − 1, and for weights that are not one finite number from 0 for each point.
    """

    points: Points
    weights: Costs

    def __init__(self, points: ArrayLike, weights: ArrayLike) -> None:
        table = as_points(points, "demand")
        counts = np.asarray(weights, np.float64)
        if counts.shape != (len(table),):
            raise InputError(f"demand: {counts.size} weights for {len(table)} points; give one for each point")
        wrong = np.flatnonzero(~(np.isfinite(counts) & (counts >= 0)))
        if wrong.size:
            row = int(wrong[0])
            raise InputError(
                f"demand: the weight of point {name(table[row])} is {counts[row]}; "
                "it must be a finite number of at least 0"
            )
        order = np.lexsort((counts, *table.T[::-1]))
        order = order[counts[order] > 0]
        table, counts = table[order], counts[order]
        first = np.ones(len(table), bool)
        first[1:] = (table[1:] != table[:-1]).any(1)
        table = table[first]
        counts = np.add.reduceat(counts, np.flatnonzero(first)) if counts.size else counts
        for array in (table, counts):
            array.setflags(write=False)
        object.__setattr__(self, "points", table)
        object.__setattr__(self, "weights", counts)

    @property
    def dimensions(self) -> int:
        """Columns of `points`."""
        return int(self.points.shape[1])


def as_points(rows: ArrayLike, what: str) -> Points:
    """`rows` as int64 [n, d]. Raises InputError, naming `what`, for anything else than `Demand` accepts."""
    try:
        table = np.asarray(rows)
    except ValueError:
        raise InputError(f"{what}: the points are not rows of the same length") from None
    if table.ndim != 2 or not 1 <= table.shape[1] <= 3:
        raise InputError(f"{what}: points of shape {table.shape} are not rows of 1 to 3 numbers")
    if table.size and not np.issubdtype(table.dtype, np.integer):
        raise InputError(f"{what}: points of type {table.dtype} are not integers")
    if table.size and (int(table.min()) < 0 or int(table.max()) >= MAX_VALUE):
        row = table[((table < 0) | (table >= MAX_VALUE)).any(1)][0]
        raise InputError(f"{what}: point {name(row)} must be within 0 and {MAX_VALUE - 1} in every dimension")
    return table.astype(np.int64)


def name(point: Points) -> str:
    """A point as messages show it: (4, 512)."""
    return f"({', '.join(str(int(value)) for value in point)})"


def sums(groups: NDArray[np.int64], amounts: Costs, size: int = 0) -> Costs:
    """The sum of the amounts of each group 0, 1, 2 …, at least `size` of them."""
    totals: Costs = np.bincount(groups, amounts, size).astype(np.float64, copy=False)
    return totals
