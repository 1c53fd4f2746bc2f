"""The best lists for a server that takes the first shape, in sort order, that covers a step: exact rows, then moves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.servers.base import Demand, Shape
from llmc.buckets.servers.nested import NEVER, Grid

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
