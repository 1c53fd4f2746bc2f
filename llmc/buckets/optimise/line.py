"""Exact solution in one dimension: the buckets of least total cost along a line, for every bucket count at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.optimise.demand import Costs, sums
from llmc.buckets.optimise.instance import Found, Instance

Indices = NDArray[np.int64]

ROUNDS = 24
"""Vectorised passes over a hull before the few remaining points are processed one by one."""


@dataclass(frozen=True, eq=False)
class Line:
    """n indices in a row, each with the cost of a bucket that serves every step up to there.

    costs    float64 [n], ascending; equal neighbours are allowed
    weights  float64 [n], at least 0: how often a step rounds up to the index
    forced   bool [n]: where a bucket is always chosen

    A step is served by the first chosen index at or after its own. The last index must have weight or be forced.
    """

    costs: Costs
    weights: Costs
    forced: NDArray[np.bool_]

    def solve(self, counts: Sequence[int]) -> list[Indices]:
        """Return, for each of `counts`, the ascending indices of at most that many buckets of least total cost.

        Every count must allow the forced indices and the last one. Of equal choices the one with fewest buckets, then
        with the lowest indices, is taken.

        With W the cumulated weights, D_k(i) = min over j ≤ i of D_{k−1}(j) + costs[i] · (W(i) − W(j)) is the least cost
        of serving the indices up to i when i is the last of at most k (j = i: fewer than k suffice). No j > i, with no
        forced index between i and j, is better: giving up the buckets after i saves at least costs[i] · (W(j) − W(i))
        of D_{k−1}(j). The condition on j may thus be dropped, and each D_k(i) is a query, at slope costs[i], of the
        lower convex hull of the points (W(j), D_{k−1}(j)), as in the convex-hull trick: O(n) per layer, one hull for
        each stretch between forced indices.
        """
        size = len(self.costs)
        layers = min(max(counts), size)
        total = np.concatenate([[0.0], np.cumsum(self.weights)])
        bounds = [0, *(np.flatnonzero(self.forced) + 1), size]
        stretches = list(pairwise(bounds))
        best = np.full(size + 1, np.inf)
        best[0] = 0.0
        sources = np.zeros((layers, size + 1), np.int32)
        finals = [float(best[size])]
        for layer in range(layers):
            following = np.full(size + 1, np.inf)
            following[0] = 0.0
            for low, high in stretches:
                if np.isinf(best[low]):
                    break
                origins = low + np.flatnonzero(np.isfinite(best[low : high + 1]))
                hull = origins[_lower_hull(total[origins], best[origins])]
                ends = np.arange(low + 1, high + 1)
                costs = self.costs[low:high]
                tangent = np.searchsorted(np.diff(best[hull]) / np.diff(total[hull]), costs)
                source = hull[np.minimum(tangent, np.searchsorted(hull, ends, "right") - 1)]
                following[ends] = best[source] + costs * (total[ends] - total[source])
                sources[layer, ends] = source
            best = following
            finals.append(float(best[size]))
        return [_trace(sources, int(np.argmin(finals[: count + 1]))) for count in counts]


def _trace(sources: NDArray[np.int32], layers: int) -> Indices:
    """The indices that end the layers, from the last one back; a layer that ends where it begins adds none."""
    end, indices = sources.shape[1] - 1, []
    for layer in range(layers - 1, -1, -1):
        source = int(sources[layer, end])
        if source < end:
            indices.append(end - 1)
        end = source
    return np.asarray(indices[::-1], np.int64)


def _lower_hull(x: Costs, y: Costs) -> Indices:
    """Indices of the vertices of the lower convex hull of points in ascending order, including the first and the last.

    A point on or above the line between two others is not a vertex, so all points above their neighbours' lines are
    removed at once, repeatedly. The points left after `ROUNDS` passes are processed in order.
    """
    hull = np.flatnonzero(np.concatenate([[True], np.diff(x) > 0]))
    for _ in range(ROUNDS):
        dx, dy = np.diff(x[hull]), np.diff(y[hull])
        above = dy[:-1] * dx[1:] >= dy[1:] * dx[:-1]
        if not above.any():
            return hull
        hull = np.concatenate([hull[:1], hull[1:-1][~above], hull[-1:]])
    kept: list[int] = []
    xs, ys = x.tolist(), y.tolist()
    for c in hull.tolist():
        while len(kept) > 1:
            a, b = kept[-2:]
            if (ys[b] - ys[a]) * (xs[c] - xs[b]) < (ys[c] - ys[b]) * (xs[b] - xs[a]):
                break
            kept.pop()
        kept.append(c)
    return np.asarray(kept, np.int64)


def solve(instance: Instance, counts: Sequence[int]) -> list[Found] | None:
    """Return the best choice for each of `counts`, or None where the buckets have no total order.

    None occurs where the demand has several levels in more than one dimension. It also occurs where a required bucket
    covers less than all of it but costs more than the next longer bucket (it is larger in a dimension that does not
    matter here). A bucket that costs at least what a required one does, and covers no more, is never chosen: its steps
    go to that required bucket. Without such buckets, longer ones cost more, and each step is served by the next one.
    """
    if sum(size > 1 for size in instance.shape) > 1:
        return None
    axis = int(np.argmax(instance.shape))
    required = instance.space.required
    buckets, costs = instance.cheapest(instance.indices)
    floors, required_costs = instance.floors(required), instance.space.cost(required)
    reach = np.where((floors >= 0).all(1), floors[:, axis], -1)
    kept = np.ones(len(costs), bool)
    used: list[int] = []
    for index in np.lexsort((required_costs, -reach)).tolist():
        if reach[index] < 0 or (used and required_costs[index] >= required_costs[used[-1]]):
            continue
        if np.append(costs, np.inf)[reach[index] + 1] < required_costs[index]:
            return None
        kept[: reach[index] + 1] &= costs[: reach[index] + 1] < required_costs[index]
        used.append(index)
    keys = np.concatenate([2 * np.flatnonzero(kept), 2 * reach[used] + 1])
    order = np.argsort(keys)
    line_buckets = np.concatenate([buckets[kept], required[used]])[order]
    line_costs = np.concatenate([costs[kept], required_costs[used]])[order]
    step_at = np.searchsorted(keys[order], 2 * np.arange(len(costs)))
    weights = sums(step_at, instance.weights, len(order))
    line = Line(line_costs, weights, keys[order] % 2 == 1)
    spare = len(required) - len(used)
    found = []
    for chosen in line.solve([graphs - spare for graphs in counts]):
        cost = float((weights * line_costs[chosen[np.searchsorted(chosen, np.arange(len(weights)))]]).sum())
        found.append(Found(np.concatenate([line_buckets[chosen], required]), cost, cost))
    return found
