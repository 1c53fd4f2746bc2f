"""A choice of buckets on an instance: the bucket that serves each client, and its cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.optimise.demand import Costs, Points, sums
from llmc.buckets.optimise.instance import Indices, Instance

MAX_ROWS = 1 << 21
"""Buckets of the lines whose costs are cached, about 32 bytes each."""

TOGETHER = 1 << 18
"""Pairs of a bucket and a client that are compared at once; bounds the memory used."""


class Serving:
    """Chosen buckets, the required ones first, and the cheapest and second cheapest that cover each client.

    buckets  int64 [k, d]
    first    int64 [n], the index of the cheapest bucket that covers the client; k where none does
    """

    def __init__(self, instance: Instance, buckets: Points) -> None:
        space = instance.space
        self.instance = instance
        self.fixed = len(space.required)
        new = ~(buckets[:, None] == space.required[None]).all(2).any(1)
        self.buckets = np.concatenate([space.required, buckets[new]])
        self._costs = space.cost(self.buckets)
        self._floors = instance.floors(self.buckets)
        self._columns = [np.ascontiguousarray(column) for column in instance.indices.T]
        # an uncovered client counts more than all clients together at the highest cost
        dearest = max(space.dearest, self._costs[: self.fixed].max(initial=0.0))
        self._penalties = 2.0 * dearest * instance.weights.sum() / instance.weights
        self._rows: dict[tuple[int, ...], tuple[Points, Costs]] = {}
        self._everyone = np.arange(len(instance.indices))
        self.first = np.empty(len(instance.indices), np.int64)
        self._second = self.first.copy()
        self._serve(self._everyone)

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def costs(self) -> Costs:
        """float64 [n]: the cost of serving each client; an uncovered client costs more than all covered ones can."""
        return self._costs_of(self.first)

    @property
    def total(self) -> float:
        """Σ weight · cost over the clients."""
        return self.sum(self.costs)

    def sum(self, costs: Costs) -> float:
        """Return Σ weight · cost for other costs of the clients; not by BLAS, whose sums depend on its threads."""
        return float((costs * self.instance.weights).sum())

    @property
    def covers_all(self) -> bool:
        """Whether every client is served."""
        return bool((self.first < len(self)).all())

    def floor(self, index: int) -> Indices:
        """Return the highest levels that a bucket reaches."""
        floor: Indices = self._floors[index]
        return floor

    def cost(self, index: int) -> float:
        """Return a bucket's cost."""
        return float(self._costs[index])

    def costs_without(self, index: int) -> Costs:
        """Return `costs` if the bucket were not chosen."""
        return self._costs_of(np.where(self.first == index, self._second, self.first))

    def losses(self) -> Costs:
        """Return float64 [k]: how much the total grows when a bucket is dropped; infinite for required ones."""
        growth = self.instance.weights * (self._costs_of(self._second) - self.costs)
        losses = sums(self.first, growth, len(self) + 1)[:-1]
        losses[: self.fixed] = np.inf
        return losses

    def add(self, bucket: Points) -> None:
        """Add one bucket."""
        self.first[self.first == len(self)] += 1
        self._second[self._second == len(self)] += 1
        self.buckets = np.concatenate([self.buckets, bucket[None]])
        self._costs = np.append(self._costs, self.instance.space.cost(bucket[None]))
        self._floors = np.concatenate([self._floors, self.instance.floors(bucket[None])])
        self._offer(len(self) - 1, self._everyone)

    def replace(self, index: int, bucket: Points) -> None:
        """Replace one bucket with another."""
        held = (self.first == index) | (self._second == index)
        self.buckets[index] = bucket
        self._costs[index] = self.instance.space.cost(bucket[None])[0]
        self._floors[index] = self.instance.floors(bucket[None])[0]
        self._serve(np.flatnonzero(held))
        self._offer(index, np.flatnonzero(~held))

    def drop(self, index: int) -> None:
        """Drop one bucket."""
        held = np.flatnonzero((self.first == index) | (self._second == index))
        self.buckets = np.delete(self.buckets, index, 0)
        self._costs, self._floors = np.delete(self._costs, index), np.delete(self._floors, index, 0)
        self.first[self.first > index] -= 1
        self._second[self._second > index] -= 1
        self._serve(held)

    def line(self, position: Indices, axis: int) -> tuple[Points, Costs]:
        """Return `Instance.cheapest` of the points that differ from `position` only along `axis`."""
        key = (axis, *np.delete(position, axis).tolist())
        if key not in self._rows:
            if sum(len(costs) for _, costs in self._rows.values()) > MAX_ROWS:
                self._rows.clear()
            positions = np.repeat(position[None], self.instance.shape[axis], axis=0)
            positions[:, axis] = np.arange(len(positions))
            self._rows[key] = self.instance.cheapest(positions)
        return self._rows[key]

    def _costs_of(self, indices: NDArray[np.int64]) -> Costs:
        return np.where(indices < len(self), np.append(self._costs, 0.0)[indices], self._penalties)

    def _covered(self, index: int, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        covered = self._columns[0][clients] <= self._floors[index, 0]
        for column, floor in zip(self._columns[1:], self._floors[index, 1:], strict=True):
            covered &= column[clients] <= floor
        members: NDArray[np.int64] = clients[covered]
        return members

    def _serve(self, clients: NDArray[np.int64]) -> None:
        """Find both buckets of these clients again; ties go to the bucket chosen earlier."""
        order = np.argsort(self._costs, kind="stable")
        ranked = np.append(order, len(self))
        for part in np.split(clients, range(TOGETHER // len(ranked), len(clients), TOGETHER // len(ranked))):
            covers = np.ones((len(ranked), len(part)), bool)
            for column, floors in zip(self._columns, self._floors.T, strict=True):
                covers[:-1] &= column[part] <= floors[order][:, None]
            best = covers.argmax(axis=0)
            covers[np.minimum(best, len(order) - 1), np.arange(len(part))] = False
            self.first[part], self._second[part] = ranked[best], ranked[covers.argmax(axis=0)]

    def _offer(self, index: int, clients: NDArray[np.int64]) -> None:
        """Assign the bucket to clients for which it costs less than their current ones."""
        covered = self._covered(index, clients)
        costs = np.append(self._costs, np.inf)
        cheapest = costs[index] < costs[self.first[covered]]
        wins = covered[cheapest]
        self._second[wins] = self.first[wins]
        self.first[wins] = index
        rest = covered[~cheapest]
        self._second[rest[costs[index] < costs[self._second[rest]]]] = index
