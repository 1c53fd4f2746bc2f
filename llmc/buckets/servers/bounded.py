"""Families of one number whose server takes the next graph above only where it is at most a multiple of the step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.servers.base import Demand, Found, Shape
from llmc.errors import InputError


class WithinFactor:
    """Takes the least number at or above the one asked for, unless it is above `factor` times that; then, and above
    the largest, a step runs eagerly in its own shape."""

    def __init__(self, shapes: Sequence[Shape], factor: int) -> None:
        self._values = [value for (value,) in shapes]
        self._factor = factor

    def find(self, shape: Shape) -> Found:
        """The graph that a step of `shape` takes."""
        place = bisect_left(self._values, shape[0])
        if place < len(self._values) and self._values[place] <= self._factor * shape[0]:
            return Found((self._values[place],))
        return Found(shape, "eager")


def choose(demands: Mapping[Shape, Demand], candidates: Sequence[int], most: int, factor: int) -> tuple[Shape, ...]:
    """At most `most` of `candidates`, ascending, that pad the steps of `demands` least and give a graph to every step
    that all candidates together would; the first and the last are always among them.

    Exact: with D_k(i) the least work of the steps up to candidate i, the last of at most k chosen ones, D_k(i) is the
    least over j of D_{k−1}(j) + candidate i times the steps in between, where no step is left behind: candidate i is
    at most `factor` times the number behind candidate j. Takes O(most · candidates²). Raises InputError where `most`
    numbers leave steps without a graph.
    """
    places = np.asarray(candidates, np.int64)
    weights = np.zeros(len(places))
    for (value,), demand in demands.items():
        place = int(np.searchsorted(places, value))
        if place < len(places) and places[place] <= factor * value:
            weights[place] += demand.steps
    total = np.cumsum(weights)
    step = places[None, :] * (total[None, :] - total[:, None])
    allowed = (np.arange(len(places))[:, None] < np.arange(len(places))) & (places <= factor * (places[:, None] + 1))
    step[~allowed] = np.inf
    best = np.full(len(places), np.inf)
    best[0] = places[0] * weights[0]
    sources: list[NDArray[np.int64]] = []
    finals = [best[-1]]
    for _ in range(1, min(most, len(places))):
        sums = best[:, None] + step
        sources.append(sums.argmin(0))
        best = sums.min(0)
        finals.append(best[-1])
    chosen = int(np.argmin(finals))
    if not np.isfinite(finals[chosen]):
        raise InputError(f"at most {most} graphs, but {_least(places, factor)} are needed for every step to have one")
    found = [len(places) - 1]
    for source in reversed(sources[:chosen]):
        found.append(int(source[found[-1]]))
    return tuple((int(places[place]),) for place in reversed(found))


def _least(places: NDArray[np.int64], factor: int) -> int:
    """How many candidates it takes from the first to the last with no step left behind."""
    count, place = 1, 0
    while place < len(places) - 1:
        place = int(np.searchsorted(places, factor * (places[place] + 1), "right")) - 1
        count += 1
    return count
