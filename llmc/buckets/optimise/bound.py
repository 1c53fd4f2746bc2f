"""A lower bound on the cost of every choice: the Lagrangian dual of the p-median problem, on a relaxed grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llmc.buckets.optimise.demand import Costs, Points, sums
from llmc.buckets.optimise.gains import FacilityLines
from llmc.buckets.optimise.instance import Indices, Instance

MAX_CORRECTIONS = 1 << 17
"""Most pairs of a facility and a client for which the client's own cost is taken into account."""

ROUNDING = 1e-9
"""Fraction of the total cost by which bounds are lowered: far more than the rounding error of their sums."""

FIRST_STEP, LAST_STEP = 1.5, 0.01
"""Lengths of the first and the shortest step of an ascent, in units of Held and Karp's step."""

PATIENCE = 6
"""Steps without progress after which the ascent returns to its best point and halves its steps."""

PROGRESS = 2e-5
"""Least growth of the bound that counts as progress, as a fraction of it."""

MOMENTUM = 0.3
"""Share of the last direction in the next one, which keeps the ascent from zigzagging."""


class _Point(NamedTuple):
    bound: float
    slope: Costs
    facilities: Indices


class Dual:
    """Lower bounds for an instance, from its levels cut into cells that end at the indices `kept`.

    Relaxation. All buckets of a cell become one facility j: it covers what the largest of them covers, and its cost c_j
    is that of the cheapest. A client i is covered where any client of its cell is, and pays max(own_i, c_j), own_i
    being the least cost at which any bucket serves it. A choice of buckets thus becomes a choice of no more facilities
    that costs no more; required buckets stay as they are. Now all clients of a cell prefer the same facility: they are
    one client k, which pays G_k(c_j) = Σ weight_i · max(own_i, c_j).

    Bound. For any prices u ≥ 0, every choice of the required buckets and `free` others costs at least Σ u_k − Σ over
    the required of gain_j − Σ of the `free` largest gain_j, where gain_j = Σ over the clients k that j covers of max(0,
    u_k − G_k(c_j)): the cost of a choice is at least Σ u_k − Σ over its facilities of the amounts u_k − G_k(c_j) of the
    clients they serve.
    """

    def __init__(self, instance: Instance, kept: Sequence[Indices]) -> None:
        self._instance, self._kept = instance, kept
        space = instance.space
        lows = [np.concatenate([[0], each[:-1] + 1]) for each in kept]
        costs = space.least_costs([each[low] for each, low in zip(instance.levels, lows, strict=True)])
        cells = np.stack([np.searchsorted(each, instance.indices[:, axis]) for axis, each in enumerate(kept)], axis=1)
        used, self._member_of = np.unique(np.ravel_multi_index(tuple(cells.T), costs.shape), return_inverse=True)
        self._weights = sums(self._member_of, instance.weights)
        self._scale = sums(self._member_of, instance.weights * instance.own)
        self._indices = np.stack(np.unravel_index(used, costs.shape), axis=1)
        self._costs = costs.ravel()
        self._lines = FacilityLines(costs, self._indices, self._weights)
        payments = _Payments(self._member_of, instance.own, instance.weights)
        self._facility, self._client = self._lines.cheaper_than(payments.dearest, MAX_CORRECTIONS)
        self._plain = self._weights[self._client] * self._costs[self._facility]
        self._full = payments(self._client, self._costs[self._facility])
        lowest = np.stack([low[self._indices[:, axis]] for axis, low in enumerate(lows)], axis=1)
        covers = (instance.floors(space.required)[:, None] >= lowest[None]).all(2)
        served = [payments(np.arange(len(used)), np.full(len(used), cost)) for cost in space.cost(space.required)]
        self._required = np.where(covers, np.reshape(served, covers.shape), np.inf)

    def ascend(self, values: Costs, free: int, target: float, steps: int) -> tuple[float, Costs, Points]:
        """Return the best bound of a subgradient ascent, its prices, and the buckets it would choose.

        values  float64 [n], initial price for each client of the instance and unit of weight
        target  the cost of a known choice, which sets the length of steps (Held and Karp)
        """
        prices = sums(self._member_of, self._instance.weights * values)
        best, best_prices = self._at(prices, free), prices
        point, direction = best, best.slope
        length, waited = FIRST_STEP, 0
        for _ in range(steps):
            reach = float((direction * direction * self._scale).sum())
            if length < LAST_STEP or point.bound >= target or not reach:
                break
            prices = np.maximum(prices + length * (target - point.bound) / reach * direction * self._scale, 0.0)
            point = self._at(prices, free)
            waited = 0 if point.bound > best.bound + PROGRESS * abs(best.bound) else waited + 1
            if point.bound > best.bound:
                best, best_prices = point, prices
            direction = point.slope + MOMENTUM * direction
            if waited == PATIENCE:
                length, waited = length / 2, 0
                point, prices, direction = best, best_prices, best.slope
        return best.bound - ROUNDING * target, (best_prices / self._weights)[self._member_of], self._buckets(best)

    def _at(self, prices: Costs, free: int) -> _Point:
        gains = self._lines.gains(prices / self._weights)
        plain = np.maximum(prices[self._client] - self._plain, 0.0)
        full = np.maximum(prices[self._client] - self._full, 0.0)
        gains -= sums(self._facility, plain - full, len(gains))
        chosen = np.argpartition(-gains, free)[:free] if free < len(gains) else np.arange(len(gains))
        chosen = chosen[gains[chosen] > 0]
        recovered = np.maximum(prices - self._required, 0.0)
        served = self._costs[chosen][:, None] < (prices / self._weights)[None]
        for axis, corner in enumerate(np.unravel_index(chosen, self._lines.shape)):
            served &= self._indices[:, axis][None] <= corner[:, None]
        times = served.sum(0) + (recovered > 0).sum(0)
        is_chosen = np.zeros(len(gains), bool)
        is_chosen[chosen] = True
        dear = is_chosen[self._facility] & (plain > 0) & (full <= 0)
        times -= np.bincount(self._client[dear], minlength=len(times))
        return _Point(float(prices.sum() - gains[chosen].sum() - recovered.sum()), 1.0 - times, chosen)

    def _buckets(self, point: _Point) -> Points:
        corners = np.unravel_index(point.facilities, self._lines.shape)
        indices = np.stack([each[corner] for each, corner in zip(self._kept, corners, strict=True)], axis=1)
        buckets, costs = self._instance.cheapest(indices)
        return buckets[np.isfinite(costs)]


class _Payments:
    """G_k(c) for clients k that merge several: Σ weight_i · max(own_i, c) over the members i of k."""

    def __init__(self, client: Indices, own: Costs, weights: Costs) -> None:
        order = np.lexsort((own, client))
        own, weights, client = own[order], weights[order], client[order]
        self._known = np.unique(own)
        self._keys = client * (len(self._known) + 1) + np.searchsorted(self._known, own)
        self._weight = np.concatenate([[0.0], np.cumsum(weights)])
        self._total = np.concatenate([[0.0], np.cumsum(weights * own)])
        self._ends = np.concatenate([[0], np.flatnonzero(np.diff(client)) + 1, [len(order)]])
        self.dearest = own[self._ends[1:] - 1]

    def __call__(self, client: Indices, cost: Costs) -> Costs:
        split = np.searchsorted(self._keys, client * (len(self._known) + 1) + np.searchsorted(self._known, cost))
        below = self._weight[split] - self._weight[self._ends[client]]
        above = self._total[self._ends[client + 1]] - self._total[split]
        return np.asarray(cost * below + above, np.float64)
