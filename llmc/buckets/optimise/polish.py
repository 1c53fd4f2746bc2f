"""The last steps of a choice, at full resolution: cover what is left, slide buckets, shrink them to what they serve."""

from __future__ import annotations

import numpy as np

from llmc.buckets.optimise.demand import Costs, Points, sums
from llmc.buckets.optimise.instance import Places
from llmc.buckets.optimise.search import ENOUGH, WORTH, trim
from llmc.buckets.optimise.serving import Serving


def cover(serving: Serving, graphs: int) -> None:
    """Add buckets until every client is covered, then drop down to `graphs`, those that are missed least.

    That can leave clients uncovered where few choices of `graphs` buckets cover all.
    """
    instance = serving.instance
    while not serving.covers_all:
        left = np.flatnonzero(serving.first == len(serving))
        place = instance.places[left[np.argmax(instance.own[left])]]
        values = serving.costs
        found = [_best_on_line(serving, place, axis, values, int(place[axis])) for axis in range(len(place))]
        serving.add(max(found, key=lambda option: option[1])[0])
    trim(serving, graphs)


def spend(serving: Serving, graphs: int) -> Serving:
    """With buckets of their own for the clients that save most by it, up to `graphs` buckets."""
    instance = serving.instance
    buckets, costs = instance.cheapest(instance.places)
    savings = instance.weights * (serving.costs - costs)
    order = np.argsort(-savings, kind="stable")[: max(0, graphs - len(serving))]
    own = buckets[order[savings[order] > WORTH * serving.total]]
    return Serving(instance, np.concatenate([serving.buckets, own])) if len(own) else serving


def slide(serving: Serving, passes: int) -> None:
    """Move each bucket to the best place on the lines through it, until a pass changes little."""
    for _ in range(passes):
        before = serving.total
        for index in range(serving.fixed, len(serving)):
            for axis in range(len(serving.instance.levels)):
                without = serving.costs_without(index)
                bucket, gain = _best_on_line(serving, serving.floor(index), axis, without)
                if serving.sum(without) - gain < serving.total * (1 - WORTH):
                    serving.replace(index, bucket)
        if serving.total > before * (1 - ENOUGH):
            return


def shrink(serving: Serving) -> None:
    """Lower each bucket to the cheapest one that covers what it serves; drop those that serve nothing."""
    instance = serving.instance
    for index in range(len(serving) - 1, serving.fixed - 1, -1):
        served = instance.places[serving.first == index]
        if not len(served):
            serving.drop(index)
            continue
        buckets, costs = instance.cheapest(served.max(0)[None])
        if costs[0] < serving.cost(index):
            serving.replace(index, buckets[0])


def _best_on_line(serving: Serving, place: Places, axis: int, values: Costs, least: int = 0) -> tuple[Points, float]:
    """The bucket that saves most for clients served at `values`, and what it saves, or −1 where there is no bucket.

    It is one of the line through `place` along `axis`, from the level `least` on. A client prefers the buckets from
    its own place up to where their costs reach its value, so that savings are differences of running sums.
    """
    instance = serving.instance
    buckets, costs = serving.line(place, axis)
    reached = np.ones(len(values), bool)
    for other in range(len(place)):
        if other != axis:
            reached &= instance.places[:, other] <= place[other]
    start, values, weights = instance.places[reached, axis], values[reached], instance.weights[reached]
    end = np.maximum(start, np.searchsorted(costs, values))
    size = len(costs) + 1
    amounts = np.cumsum(sums(start, weights * values, size) - sums(end, weights * values, size))
    weight = np.cumsum(sums(start, weights, size) - sums(end, weights, size))
    real = np.isfinite(costs)
    gains = np.where(real, amounts[:-1] - np.where(real, costs, 0.0) * weight[:-1], -1.0)
    best = least + int(np.argmax(gains[least:]))
    return buckets[best], float(gains[best])
