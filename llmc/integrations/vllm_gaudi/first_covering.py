"""The best lists where a server takes the first covering shape in sort order: rows of columns, exactly, then moves.

Such a server takes the least prepared row at or above a step's, and there the least column at or above the step's. So
rows R1 < R2 < …, each with columns of its own, cost what each row's steps cost on its own line.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.integrations.base import Demand, Shape

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


Ints = NDArray[np.int64]

ROWS, COLUMNS = 24, 56
"""Most values of each of the two numbers that are chosen from: quantiles of the steps where there are more."""

ROUNDS = 40
"""Most moves of the polish; each lowers the cost."""


def thinned(values: Mapping[int, float], most: int, required: Iterable[int] = ()) -> list[int]:
    """At most about `most` of `values`, which have weights: all where they are few, else quantiles; and `required`."""
    ordered = sorted(values)
    if len(ordered) > most:
        sums = np.cumsum([values[value] for value in ordered])
        places = np.searchsorted(sums, np.linspace(0, sums[-1], most + 1)[1:] * (1 - 1e-12))
        ordered = [ordered[place] for place in sorted({*places.tolist(), len(ordered) - 1})]
    return sorted({*ordered, *required})


def grid(
    steps: Mapping[tuple[int, int], float],
    rows: Sequence[int],
    columns: Sequence[int],
    cost: Callable[[int, int], float | None],
    most: int,
    *,
    full: bool = False,
) -> list[tuple[int, int]]:
    """At most `most` of (row, column) that serve `steps` at the least cost where no step leaves its row.

    Rows and columns ascend, their last ones cover all steps, and that point is chosen in any case; with `full` the last
    column of every row that is chosen. `cost` of a point is what one run costs, None where there can be no such shape.
    """
    known = [[cost(row, column) for column in columns] for row in rows]
    costs = np.array([[NEVER if value is None else value for value in row] for row in known], np.float64)
    weights = np.zeros(costs.shape)
    for (row, column), number in steps.items():
        weights[bisect_left(rows, row), bisect_left(columns, column)] += number
    return [(rows[row], columns[column]) for row, column in Grid(weights, costs, full).solve(most)]


def rounded(demands: Mapping[Shape, Demand], axes: Sequence[Sequence[int]]) -> dict[Shape, float]:
    """Steps by shape, each number rounded up to the next of its axis (ascending, the last one above all)."""
    found: dict[Shape, float] = {}
    for shape, demand in demands.items():
        point = tuple(axis[bisect_left(axis, number)] for axis, number in zip(axes, shape, strict=True))
        found[point] = found.get(point, 0.0) + demand.steps
    return found


def polish(
    steps: Mapping[Shape, float],
    chosen: Iterable[Shape],
    candidates: Iterable[Shape],
    required: Iterable[Shape],
    most: int,
    cost: Callable[[Shape], float],
) -> list[Shape]:
    """`chosen` after moves that lower the cost by the server's own look-up: one added while there are fewer than
    `most`, one left out, or one exchanged for another of `candidates`. `required` ones stay."""
    points = np.array(list(steps), np.int64)
    weights = np.array(list(steps.values()), np.float64)
    fixed = set(required)
    shapes = sorted({*chosen, *fixed, *candidates})
    costs = np.array([cost(shape) for shape in shapes])
    places = {shape: place for place, shape in enumerate(shapes)}
    covers: NDArray[np.bool_] = np.all(np.array(shapes, np.int64)[:, None, :] >= points[None, :, :], axis=2)
    kept = sorted(places[shape] for shape in {*chosen, *fixed})
    locked = {places[shape] for shape in fixed}
    total = _cost(kept, covers, costs, weights)
    for _ in range(ROUNDS):
        move = _best_move(kept, locked, covers, costs, weights, most)
        if move is None:
            break
        after = _cost(move, covers, costs, weights)
        if after >= total:
            break
        kept, total = move, after
    return [shapes[place] for place in kept]


def _first(kept: Sequence[int], covers: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """The place among `kept` that serves each point, and whether one does."""
    rows = covers[list(kept)]
    served: NDArray[np.bool_] = np.any(rows, axis=0)
    return np.argmax(rows, axis=0), served


def _cost(
    kept: Sequence[int], covers: NDArray[np.bool_], costs: NDArray[np.float64], weights: NDArray[np.float64]
) -> float:
    first, served = _first(kept, covers)
    return float((weights * np.where(served, costs[np.array(kept)[first]], NEVER)).sum())


def _best_move(
    kept: list[int],
    locked: set[int],
    covers: NDArray[np.bool_],
    costs: NDArray[np.float64],
    weights: NDArray[np.float64],
    most: int,
) -> list[int] | None:
    """`kept` after the best addition, or the best exchange where it is full; None without any that helps."""
    if len(kept) < most:
        place, change = _best_addition(kept, covers, costs, weights)
        return sorted([*kept, place]) if change < 0 else None
    first, _ = _first(kept, covers)
    loads = np.bincount(first, weights, len(kept))
    losses = []
    for position, place in enumerate(kept):
        if place in locked:
            continue
        rest = [other for other in kept if other != place]
        if loads[position] == 0:
            losses.append((0.0, place))
            continue
        touched = first == position
        losses.append((_cost(rest, covers[:, touched], costs, weights[touched])
                       - float((weights[touched] * costs[place]).sum()), place))  # fmt: skip
    for loss, place in sorted(losses)[:3]:
        rest = [other for other in kept if other != place]
        added, change = _best_addition(rest, covers, costs, weights)
        if change + loss < -1e-9:
            return sorted([*rest, added])
    return None


def _best_addition(
    kept: list[int], covers: NDArray[np.bool_], costs: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[int, float]:
    """The candidate that lowers the cost most when it is added, and by how much (negative)."""
    first, served = _first(kept, covers)
    place = np.where(served, np.array(kept)[first], len(costs))
    paid = np.where(served, costs[np.minimum(place, len(costs) - 1)], NEVER)
    taken = covers & (np.arange(len(costs))[:, None] < place[None, :])
    changes = taken @ -(weights * paid) + costs * (taken @ weights)
    best = int(np.argmin(changes))
    return best, float(changes[best])
