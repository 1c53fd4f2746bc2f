"""The buckets to choose from, and their costs: a product of values within limits, or a list."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmc.buckets.cost.work import least_of_larger
from llmc.buckets.optimise.demand import Costs, Points

CostFunction = Callable[[Points], Costs]
"""Costs of the buckets in the rows of its argument: above 0, strictly increasing in every dimension."""

MAX_CORNERS = 1 << 22
"""Corners of a list's grid whose costs are precomputed, 4 bytes each; beyond it each corner is searched."""

ROWS_A_SEARCH = 256
"""Corners searched together; bounds the memory used."""


class Space(ABC):
    """The allowed buckets. Points have as many columns as `values` has entries.

    values    ascending values of each dimension; every allowed bucket consists of them
    required  buckets that are always chosen, int64 [r, d], ascending; they need not be allowed ones
    """

    def __init__(self, values: tuple[Points, ...], cost: CostFunction, required: Iterable[Sequence[int]]) -> None:
        self.values = values
        self._cost = cost
        self.required: Points = np.unique(np.array(list(required), np.int64).reshape(-1, len(values)), axis=0)

    def cost(self, points: Points) -> Costs:
        """Return the costs of buckets."""
        return np.asarray(self._cost(points), np.float64)

    @property
    @abstractmethod
    def dearest(self) -> float:
        """An upper bound on the cost of any allowed bucket."""

    @abstractmethod
    def cheapest(self, points: Points) -> tuple[Points, Costs]:
        """Return the least-cost allowed bucket that covers each point, and its cost; infinite where none does.

        The first result is arbitrary where the second is infinite.
        """

    @abstractmethod
    def least_costs(self, lows: Sequence[Points]) -> Costs:
        """Return lower bounds on the cost of the allowed buckets in each cell of a grid, infinite for empty cells.

        `lows` holds the ascending lower ends of the cells in each dimension; a cell ends before the next begins, and
        the last one is unbounded. The result has one axis for each dimension.
        """


class ProductSpace(Space):
    """Every combination of the dimensions' strictly ascending values, or those that `allowed` admits.

    `allowed` returns, for each row of its argument, whether it may be a bucket. It is a limit: if it admits a bucket,
    it must admit every smaller one.
    """

    def __init__(
        self,
        values: Sequence[ArrayLike],
        cost: CostFunction,
        allowed: Callable[[Points], NDArray[np.bool_]] | None = None,
        required: Iterable[Sequence[int]] = (),
    ) -> None:
        super().__init__(tuple(np.asarray(each, np.int64) for each in values), cost, required)
        self._allowed = allowed

    @property
    def dearest(self) -> float:
        """The cost of the largest values together, whether allowed or not."""
        return float(self.cost(np.array([[each[-1] for each in self.values]]))[0])

    def cheapest(self, points: Points) -> tuple[Points, Costs]:
        """Return the points rounded up to the values, since every larger bucket costs more."""
        indices = [np.searchsorted(each, points[:, axis]) for axis, each in enumerate(self.values)]
        within = np.all([index < len(each) for index, each in zip(indices, self.values, strict=True)], axis=0)
        clipped = (each[np.minimum(index, len(each) - 1)] for index, each in zip(indices, self.values, strict=True))
        buckets = np.stack(list(clipped), axis=1)
        if self._allowed is not None:
            within &= self._allowed(buckets)
        return buckets, np.where(within, self.cost(buckets), np.inf)

    def least_costs(self, lows: Sequence[Points]) -> Costs:
        """Return the cost of the lowest bucket of each cell; if any bucket of the cell is allowed, it is as well."""
        costs = self.cheapest(product(lows))[1].reshape(tuple(len(low) for low in lows))
        for axis, (low, each) in enumerate(zip(lows, self.values, strict=True)):
            ends = np.append(low[1:], each[-1] + 1)
            lowest = np.append(each, each[-1] + 1)[np.searchsorted(each, low)]
            np.moveaxis(costs, axis, 0)[lowest >= ends] = np.inf
        return costs


class ListedSpace(Space):
    """Only the buckets of a list, for example those of a rule's plan; there is at least one."""

    def __init__(self, buckets: ArrayLike, cost: CostFunction, required: Iterable[Sequence[int]] = ()) -> None:
        table = np.unique(np.asarray(buckets, np.int64), axis=0)
        super().__init__(tuple(np.unique(column) for column in table.T), cost, required)
        costs = self.cost(table)
        order = np.argsort(costs, kind="stable")
        self._buckets, self._costs = table[order], costs[order]
        corners = np.prod([len(each) + 1 for each in self.values], dtype=np.float64)
        self._ranks = self._all_corners() if corners <= MAX_CORNERS else None

    @property
    def dearest(self) -> float:
        """The cost of the most expensive bucket of the list."""
        return float(self._costs[-1])

    def cheapest(self, points: Points) -> tuple[Points, Costs]:
        """Look up each corner of the list's grid in a table, or search where that table would be too large."""
        if self._ranks is None:
            ranks = self._search(points)
        else:
            ranks = self._ranks[tuple(np.searchsorted(each, points[:, a]) for a, each in enumerate(self.values))]
        found = np.minimum(ranks, len(self._costs) - 1)
        return self._buckets[found], np.where(ranks < len(self._costs), self._costs[found], np.inf)

    def least_costs(self, lows: Sequence[Points]) -> Costs:
        """Return the least cost of the list's buckets in each cell."""
        costs = np.full(tuple(len(low) for low in lows), np.inf)
        cells = [np.searchsorted(low, self._buckets[:, axis], "right") - 1 for axis, low in enumerate(lows)]
        inside = np.min(cells, axis=0) >= 0
        np.minimum.at(costs, tuple(cell[inside] for cell in cells), self._costs[inside])
        return costs

    def _all_corners(self) -> NDArray[np.int32]:
        """For each corner, the rank by cost of its cheapest cover; the number of buckets where nothing covers.

        One extra corner in each dimension stands for the points above every value.
        """
        ranks = np.full(tuple(len(each) + 1 for each in self.values), len(self._costs), np.int32)
        indices = tuple(np.searchsorted(each, self._buckets[:, axis]) for axis, each in enumerate(self.values))
        ranks[indices] = np.arange(len(self._costs), dtype=np.int32)
        return least_of_larger(ranks)

    def _search(self, points: Points) -> NDArray[np.int32]:
        ranks = np.empty(len(points), np.int32)
        for start in range(0, len(points), ROWS_A_SEARCH):
            rows = points[start : start + ROWS_A_SEARCH]
            covers: NDArray[np.bool_] = np.all(self._buckets[None] >= rows[:, None], axis=2)
            ranks[start : start + ROWS_A_SEARCH] = np.where(covers.any(axis=1), covers.argmax(axis=1), len(self._costs))
        return ranks


def product(values: Sequence[Points]) -> Points:
    """Return every combination of the values, int64 [m, d], ascending; without values, one row without columns."""
    if not values:
        return np.empty((1, 0), np.int64)
    return np.stack(np.meshgrid(*values, indexing="ij"), axis=-1).reshape(-1, len(values))
