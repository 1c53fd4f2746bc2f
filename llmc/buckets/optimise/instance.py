"""A demand at some resolution, every step rounded up to levels of its dimensions; and a choice of buckets for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.optimise.demand import Costs, Demand, Points, merged, name
from llmc.buckets.optimise.space import Space
from llmc.errors import InputError

Indices = NDArray[np.int64]
"""Level indices, one column a dimension; −1 below the lowest level."""


@dataclass(frozen=True, eq=False)
class Instance:
    """Clients: the distinct steps after rounding up to levels.

    levels   ascending values of each dimension, those that some step rounds up to
    places   int64 [n, d], the level of each client, distinct and ascending
    weights  float64 [n], above 0
    """

    space: Space
    levels: tuple[Points, ...]
    indices: Indices
    weights: Costs

    @classmethod
    def of(cls, space: Space, demand: Demand) -> Instance:
        """Create the instance at full resolution: steps rounded up to the values that buckets can have.

        Other values cannot help: a bucket lowered to the next used value serves the same steps at lower cost. Raises
        InputError, naming the step, when no allowed or required bucket covers one.
        """
        points = demand.points.reshape(-1, len(space.values))
        levels, positions = [], np.empty_like(points)
        for axis, values in enumerate(space.values):
            known = np.union1d(values, space.required[:, axis])
            above = np.flatnonzero(points[:, axis] > known[-1])
            if above.size:
                raise _uncovered(points[above[0]])
            used, positions[:, axis] = np.unique(np.searchsorted(known, points[:, axis]), return_inverse=True)
            levels.append(known[used])
        instance = cls(space, tuple(levels), *_merge(positions, demand.weights))
        missing = np.flatnonzero(np.isinf(instance.own))
        if missing.size:
            raise _uncovered(points[(positions == instance.indices[missing[0]]).all(1)][0])
        return instance

    def coarser(self, kept: Sequence[Indices]) -> Instance:
        """Return the instance rounded up further, to the levels at the ascending indices `kept`, including each last
        one.
        """
        levels = tuple(each[indices] for each, indices in zip(self.levels, kept, strict=True))
        positions = np.stack([np.searchsorted(each, self.indices[:, axis]) for axis, each in enumerate(kept)], axis=1)
        return Instance(self.space, levels, *_merge(positions, self.weights))

    def only(self, chosen: NDArray[np.bool_]) -> Instance:
        """Return the instance with the same levels and only the `chosen` clients."""
        return Instance(self.space, self.levels, self.indices[chosen], self.weights[chosen])

    @cached_property
    def own(self) -> Costs:
        """float64 [n]: the least cost at which any allowed or required bucket serves the client."""
        costs = self.cheapest(self.indices)[1]
        floors, required = self.floors(self.space.required), self.space.cost(self.space.required)
        for floor, cost in zip(floors, required, strict=True):
            costs = np.where((self.indices <= floor).all(1), np.minimum(costs, cost), costs)
        return costs

    @property
    def shape(self) -> tuple[int, ...]:
        """Levels of each dimension."""
        return tuple(len(each) for each in self.levels)

    def points(self, positions: Indices) -> Points:
        """Return the values at level indices."""
        return np.stack([each[positions[:, axis]] for axis, each in enumerate(self.levels)], axis=1)

    def cheapest(self, positions: Indices) -> tuple[Points, Costs]:
        """Return `Space.cheapest` of the points at level indices."""
        return self.space.cheapest(self.points(positions))

    def floors(self, buckets: Points) -> Indices:
        """Return the highest levels that buckets reach: one covers exactly the clients whose levels are at most its
        floor.
        """
        return np.stack(
            [np.searchsorted(each, buckets[:, axis], "right") - 1 for axis, each in enumerate(self.levels)], axis=1
        )


def _merge(positions: Indices, weights: Costs) -> tuple[Indices, Costs]:
    order = np.lexsort(positions.T[::-1])
    return merged(positions[order], weights[order])


def _uncovered(step: Points) -> InputError:
    return InputError(
        f"no allowed bucket covers the step {name(step)}; raise the limits or the largest values, or leave the step out"
    )


class Found(NamedTuple):
    """Buckets (int64 [k, d], the required ones among them), their cost, and a lower bound on any choice's cost."""

    buckets: Points
    cost: float
    bound: float


def fewest_buckets(instance: Instance) -> Points:
    """Return buckets that cover every client which no required bucket covers; empty where there is no such client.

    Only the largest clients matter, those below no other. Groups that one bucket covers are formed first-fit, once in
    the order of each dimension, and the smallest result is taken. In one and two dimensions it is optimal: the largest
    clients form a sequence, ascending in one dimension and descending in the other. A bucket covers neighbours in it,
    and taking as many as possible from one end is best.
    """
    largest = _largest(instance, np.flatnonzero(~required_cover(instance)))
    options = [_first_fit(instance, largest[np.argsort(largest[:, axis])]) for axis in range(len(instance.levels))]
    return instance.cheapest(min(options, key=len))[0]


def required_cover(instance: Instance) -> NDArray[np.bool_]:
    """Return bool [n]: which clients some required bucket covers."""
    covered = np.zeros(len(instance.indices), bool)
    for floor in instance.floors(instance.space.required):
        covered |= (instance.indices <= floor).all(axis=1)
    return covered


def _largest(instance: Instance, clients: NDArray[np.int64]) -> Indices:
    found = []
    while clients.size:
        index = instance.indices[clients[np.argmax(instance.indices[clients].sum(axis=1))]]
        found.append(index)
        clients = clients[(instance.indices[clients] > index).any(axis=1)]
    return np.array(found, np.int64).reshape(-1, len(instance.levels))


def _first_fit(instance: Instance, clients: Indices) -> Indices:
    groups = np.empty((0, clients.shape[1]), np.int64)
    for index in clients:
        joined = np.maximum(groups, index)
        fits = np.flatnonzero(np.isfinite(instance.cheapest(joined)[1]))
        if fits.size:
            groups[fits[0]] = joined[fits[0]]
        else:
            groups = np.concatenate([groups, index[None]])
    return groups
