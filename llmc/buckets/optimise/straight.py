"""A demand that differs in one dimension only, as a line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmc.buckets.optimise.demand import sums
from llmc.buckets.optimise.instance import Found, Instance
from llmc.buckets.optimise.line import Line


def solve(instance: Instance, counts: Sequence[int]) -> list[Found] | None:
    """The best choice for each of `counts`, or None where the buckets are not in one order.

    That is so where the demand has several levels in more than one dimension, and where a required bucket covers less
    than all of it but costs more than the next longer bucket (it is larger in a dimension that does not matter here).
    A bucket that costs at least what a required one does, and covers no more, is never chosen: its steps are given to
    that required bucket. With these out of the way, longer buckets cost more, and each step is served by the next one.
    """
    if sum(size > 1 for size in instance.shape) > 1:
        return None
    axis = int(np.argmax(instance.shape))
    required = instance.space.required
    buckets, costs = instance.cheapest(instance.places)
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
