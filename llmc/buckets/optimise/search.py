"""Local search: add, drop and move buckets while the total cost falls."""

from __future__ import annotations

import numpy as np

from llmc.buckets.optimise.instance import Instance
from llmc.buckets.optimise.lines import Lines
from llmc.buckets.optimise.serving import Serving
from llmc.buckets.optimise.space import product

WORTH = 1e-9
"""A change must lower the total by this part of it, so that rounding never makes the search run in circles."""

ENOUGH = 1e-4
"""A pass that lowers the total by less than this part of it is the last one."""


class Search:
    """Exchange of any chosen bucket for any bucket of the instance's grid, which must be small."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._buckets, costs = instance.cheapest(product([np.arange(size) for size in instance.shape]))
        self._lines = Lines(costs.reshape(instance.shape), instance.places, instance.weights)

    def fill(self, serving: Serving, graphs: int) -> None:
        """Add the bucket that saves most, up to `graphs` buckets or until none saves anything."""
        while len(serving) < graphs:
            gains = self._lines.gains(serving.costs)
            best = int(np.argmax(gains))
            if gains[best] <= WORTH * serving.total:
                return
            serving.add(self._buckets[best])

    def improve(self, serving: Serving, passes: int) -> None:
        """Exchange buckets for better ones, those that save least first, until a pass changes little."""
        self._lines.focus(serving.costs)
        for _ in range(passes):
            before = serving.total
            for index in np.argsort(serving.losses(), kind="stable")[: len(serving) - serving.fixed]:
                without = serving.costs_without(index)
                gains = self._lines.gains(without)
                best = int(np.argmax(gains))
                if serving.sum(without) - gains[best] < serving.total * (1 - WORTH):
                    serving.replace(index, self._buckets[best])
            if serving.total > before * (1 - ENOUGH):
                return


def trim(serving: Serving, graphs: int) -> None:
    """Drop the buckets that save least, down to `graphs` of them."""
    while len(serving) > graphs:
        serving.drop(int(np.argmin(serving.losses())))
