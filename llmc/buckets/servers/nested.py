"""Rows of columns, solved exactly: the best lists where a server takes the first covering shape in sort order.

Such a server takes the least prepared row at or above a step's, and there the least column at or above the step's. So
rows R1 < R2 < …, each with columns of its own, cost what each row's steps cost on its own line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NEVER = 1e15
"""The cost of what must not be chosen: above any sum of real ones, and finite, so that products of it are numbers."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Steps on a grid of rows and columns, both ascending, and what one run costs at each point.

    weights    float64 [rows, columns], at least 0: how often steps round up to the point
    costs      float64 [rows, columns], ascending along a row; `NEVER` where there can be no shape
    full       whether every row that is chosen has the last column; else it reaches its own last step

    The last point of all is always chosen. No step leaves its row.
    """

    weights: Floats
    costs: Floats
    full: bool = False

    def solve(self, most: int) -> list[tuple[int, int]]:
        """At most `most` points of least total cost, as (row, column), ascending.

        E_k(b) is the least cost of all rows up to b with at most k points, b the last row that is chosen:
        min over a < b and j of E_{k−j}(a) + C_j(a, b), with C_j(a, b) the cost of j columns for the steps of the rows
        above a up to b, all in row b. Exact, and O(rows² · columns² · most).
        """
        rows, columns = self.weights.shape
        layers = min(most, columns)
        best = np.full((rows + 1, most + 1), NEVER)
        best[0] = 0.0
        sources = np.zeros((rows + 1, most + 1, 2), np.int64)
        for end in range(rows):
            totals = self._row(end, layers)
            for start in range(end + 1):
                for count in range(1, layers + 1):
                    reached = best[start, : most + 1 - count] + totals[start, count]
                    better = np.flatnonzero(reached < best[end + 1, count:])
                    best[end + 1, count + better] = reached[better]
                    sources[end + 1, count + better] = start, count
        count, end = int(np.argmin(best[rows])), rows
        points: list[tuple[int, int]] = []
        while end:
            start, used = sources[end, count].tolist()
            points += [(end - 1, column) for column in self._columns(start, end - 1, used)]
            count, end = count - used, start
        return sorted(points)

    def _prefixes(self, end: int, start: int | None = None) -> Floats:
        """[starts, columns + 1]: cumulated weights of the rows start … end, for every start up to `end` or for one."""
        sums = np.cumsum(self.weights[end::-1], axis=0)[::-1]
        chosen = sums if start is None else sums[start : start + 1]
        return np.concatenate([np.zeros((len(chosen), 1)), np.cumsum(chosen, axis=1)], axis=1)

    def _layers(self, end: int, prefix: Floats, layers: int) -> list[Floats]:
        """For 1, 2 … columns in row `end`: [starts, columns + 1] the least cost of serving all up to the last one."""
        costs = self.costs[end]
        allowed = np.tril(np.ones((len(costs), len(costs) + 1), bool))
        current = np.full(prefix.shape, NEVER)
        current[:, 0] = 0.0
        found = []
        for _ in range(layers):
            moved = current[:, None, :] - costs[None, :, None] * prefix[:, None, :]
            least = np.where(allowed, moved, NEVER).min(axis=2)
            following = np.where(costs < NEVER, np.minimum(least + costs * prefix[:, 1:], NEVER), NEVER)
            current = np.concatenate([np.full((len(prefix), 1), NEVER), following], axis=1)
            found.append(current)
        return found

    def _ends(self, end: int, prefix: Floats) -> NDArray[np.bool_]:
        """[starts, columns + 1]: where the last column of row `end` can be: no step is beyond it."""
        ends: NDArray[np.bool_] = np.equal(prefix, prefix[:, -1:])
        if self.full or end == len(self.weights) - 1:
            ends[:, :-1] = False
        return ends

    def _row(self, end: int, layers: int) -> Floats:
        """[starts, layers + 1]: the least cost of the rows start … `end`, all in row `end`, by number of columns."""
        prefix = self._prefixes(end)
        ends = self._ends(end, prefix)
        found = [np.where(ends, layer, NEVER).min(axis=1) for layer in self._layers(end, prefix, layers)]
        return np.stack([np.full(len(prefix), NEVER), *found], axis=1)

    def _columns(self, start: int, end: int, count: int) -> list[int]:
        """The `count` columns of row `end` that serve the rows `start` … `end` at the least cost."""
        prefix = self._prefixes(end, start)
        layers = self._layers(end, prefix, count)
        place = int(np.argmin(np.where(self._ends(end, prefix)[0], layers[-1][0], np.inf)))
        columns = []
        for layer in range(count - 1, -1, -1):
            columns.append(place - 1)
            if layer:
                cost = self.costs[end, place - 1]
                place = int(np.argmin(layers[layer - 1][0, :place] - cost * prefix[0, :place]))
        return columns
