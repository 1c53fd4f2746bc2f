"""The fewest buckets that cover a demand, without regard to their cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.optimise.demand import Points
from llmc.buckets.optimise.instance import Instance, Places


def fewest_buckets(instance: Instance) -> Points:
    """Buckets that cover every client which no required bucket covers; none where there is no such client.

    Only the largest clients matter, those below no other. Groups that one bucket covers are formed first-fit, once in
    the order of each dimension, and the fewest are taken. In one and two dimensions that is the least number: the
    largest clients stand in a row, ascending in one dimension and descending in the other, a bucket covers neighbours
    in it, and taking as many as possible from one end on is best.
    """
    largest = _largest(instance, np.flatnonzero(~required_cover(instance)))
    options = [_first_fit(instance, largest[np.argsort(largest[:, axis])]) for axis in range(len(instance.levels))]
    return instance.cheapest(min(options, key=len))[0]


def required_cover(instance: Instance) -> NDArray[np.bool_]:
    """bool [n]: which clients some required bucket covers."""
    covered = np.zeros(len(instance.places), bool)
    for floor in instance.floors(instance.space.required):
        covered |= (instance.places <= floor).all(axis=1)
    return covered


def _largest(instance: Instance, clients: NDArray[np.int64]) -> Places:
    found = []
    while clients.size:
        place = instance.places[clients[np.argmax(instance.places[clients].sum(axis=1))]]
        found.append(place)
        clients = clients[(instance.places[clients] > place).any(axis=1)]
    return np.array(found, np.int64).reshape(-1, len(instance.levels))


def _first_fit(instance: Instance, clients: Places) -> Places:
    groups = np.empty((0, clients.shape[1]), np.int64)
    for place in clients:
        joined = np.maximum(groups, place)
        fits = np.flatnonzero(np.isfinite(instance.cheapest(joined)[1]))
        if fits.size:
            groups[fits[0]] = joined[fits[0]]
        else:
            groups = np.concatenate([groups, place[None]])
    return groups
