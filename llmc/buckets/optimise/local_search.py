"""Two and three dimensions: a choice by local search, with a bound on its distance from the optimum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmc.buckets.optimise.bound import ROUNDING, Dual
from llmc.buckets.optimise.demand import Costs, Points, sums
from llmc.buckets.optimise.gains import FacilityLines
from llmc.buckets.optimise.instance import Found, Indices, Instance, fewest_buckets
from llmc.buckets.optimise.serving import Serving
from llmc.buckets.optimise.space import product

WORTH = 1e-9
"""A change must lower the total by this fraction, so that rounding never makes the search cycle."""

ENOUGH = 1e-4
"""A pass that lowers the total by less than this fraction is the last one."""


class Search:
    """Exchange of any chosen bucket for any bucket of the instance's grid, which must be small."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._buckets, costs = instance.cheapest(product([np.arange(size) for size in instance.shape]))
        self._lines = FacilityLines(costs.reshape(instance.shape), instance.indices, instance.weights)

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


def cover(serving: Serving, graphs: int) -> None:
    """Add buckets until every client is covered, then drop those that save least, down to `graphs`.

    This can leave clients uncovered where few choices of `graphs` buckets cover all.
    """
    instance = serving.instance
    while not serving.covers_all:
        left = np.flatnonzero(serving.first == len(serving))
        position = instance.indices[left[np.argmax(instance.own[left])]]
        values = serving.costs
        found = [_best_on_line(serving, position, axis, values, int(position[axis])) for axis in range(len(position))]
        serving.add(max(found, key=lambda option: option[1])[0])
    trim(serving, graphs)


def spend(serving: Serving, graphs: int) -> Serving:
    """Add buckets for the clients that save most with one of their own, up to `graphs` buckets."""
    instance = serving.instance
    buckets, costs = instance.cheapest(instance.indices)
    savings = instance.weights * (serving.costs - costs)
    order = np.argsort(-savings, kind="stable")[: max(0, graphs - len(serving))]
    own = buckets[order[savings[order] > WORTH * serving.total]]
    return Serving(instance, np.concatenate([serving.buckets, own])) if len(own) else serving


def slide(serving: Serving, passes: int) -> None:
    """Move each bucket to the best index on the lines through it, until a pass changes little."""
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
    """Lower each bucket to the cheapest one that covers the clients it serves; drop buckets that serve none."""
    instance = serving.instance
    for index in range(len(serving) - 1, serving.fixed - 1, -1):
        served = instance.indices[serving.first == index]
        if not len(served):
            serving.drop(index)
            continue
        buckets, costs = instance.cheapest(served.max(0)[None])
        if costs[0] < serving.cost(index):
            serving.replace(index, buckets[0])


def _best_on_line(
    serving: Serving, position: Indices, axis: int, values: Costs, least: int = 0
) -> tuple[Points, float]:
    """The bucket that saves most for clients served at `values`, and its saving, or −1 where there is no bucket.

    The bucket is on the line through `position` along `axis`, from the level `least` on. A client prefers the buckets
    from its own index up to where their costs reach its value, so savings are differences of running sums.
    """
    instance = serving.instance
    buckets, costs = serving.line(position, axis)
    reached = np.ones(len(values), bool)
    for other in range(len(position)):
        if other != axis:
            reached &= instance.indices[:, other] <= position[other]
    start, values, weights = instance.indices[reached, axis], values[reached], instance.weights[reached]
    end = np.maximum(start, np.searchsorted(costs, values))
    size = len(costs) + 1
    amounts = np.cumsum(sums(start, weights * values, size) - sums(end, weights * values, size))
    weight = np.cumsum(sums(start, weights, size) - sums(end, weights, size))
    real = np.isfinite(costs)
    gains = np.where(real, amounts[:-1] - np.where(real, costs, 0.0) * weight[:-1], -1.0)
    best = least + int(np.argmax(gains[least:]))
    return buckets[best], float(gains[best])


LEAST_SHARE = 1e-9
"""Least share of the levels of a dimension, as a fraction of the largest share; keeps their product above 0."""


def coarse_levels(instance: Instance, cells: int) -> list[Indices]:
    """Return, for each dimension, the ascending indices of the levels to keep, their product at most about `cells`.

    Considered alone, a dimension whose demand has density f (in cost per unit of length) loses ∫ f · Δ / 2 to levels Δ
    apart. The best spacing is Δ ∝ f^(−1/2), which makes the levels equal steps of ∫ √f; with n of them the loss is (∫
    √f)² / 2n (Panter and Dite's rule for quantisers, with a linear loss). The least sum of the losses under a fixed
    product therefore has n ∝ (∫ √f)². A dimension never gets more levels than it has.
    """
    roots = [_cumulated_root(instance, axis) for axis in range(len(instance.levels))]
    largest = max(float(root[-1]) for root in roots) or 1.0
    counts = [1] * len(roots)
    open_axes = [axis for axis, size in enumerate(instance.shape) if size > 1]
    left = float(cells)
    while open_axes:
        share = [max((float(roots[axis][-1]) / largest) ** 2, LEAST_SHARE) for axis in open_axes]
        scale = (left / float(np.prod(share))) ** (1 / len(open_axes))
        full = [axis for axis, part in zip(open_axes, share, strict=True) if part * scale >= instance.shape[axis]]
        for axis in full:
            counts[axis] = instance.shape[axis]
            left = max(left / counts[axis], 1.0)
        if not full:
            for axis, part in zip(open_axes, share, strict=True):
                counts[axis] = max(2, int(part * scale))
            break
        open_axes = [axis for axis in open_axes if axis not in full]
    return [_equal_steps(root, count) for root, count in zip(roots, counts, strict=True)]


def with_corners(instance: Instance, kept: Sequence[Indices], cells: int) -> list[Indices]:
    """Return the kept levels plus those of the largest clients that no bucket would cover after rounding up.

    Rounding up can exceed a limit on products such as batch · query. A client below one whose levels are all kept is
    rounded up to that one at most, so the levels of the largest clients suffice. They are added as long as the product
    of the level counts is at most `cells`.
    """
    levels = list(kept)
    coarse = np.stack(
        [each[np.searchsorted(each, instance.indices[:, axis])] for axis, each in enumerate(kept)], axis=1
    )
    left = np.flatnonzero(np.isinf(instance.cheapest(coarse)[1]))
    while left.size:
        corner = instance.indices[left[np.argmax(instance.own[left])]]
        more = [np.union1d(each, [position]) for each, position in zip(levels, corner, strict=True)]
        if np.prod([len(each) for each in more]) > cells:
            break
        levels = more
        left = left[(instance.indices[left] > corner).any(1)]
    return levels


def _cumulated_root(instance: Instance, axis: int) -> Costs:
    """∫ √f up to each level; a level's demand is spread from the level below up to it."""
    levels = instance.levels[axis]
    density = instance.weights * instance.own / (instance.points(instance.indices)[:, axis] + 1.0)
    mass = sums(instance.indices[:, axis], density, len(levels))
    return np.cumsum(np.sqrt(mass * np.diff(levels, prepend=min(0, int(levels[0])))))


def _equal_steps(root: Costs, count: int) -> Indices:
    if count >= len(root):
        return np.arange(len(root))
    targets = root[-1] * np.arange(1, count + 1) / count
    return np.unique(np.append(np.minimum(np.searchsorted(root, targets), len(root) - 1), len(root) - 1))


SEARCH_CELLS = 2048
"""Grid buckets among which the search exchanges any one for any other."""

MAX_CELLS = 8192
"""Buckets of that grid when it is extended with the levels that the largest steps need."""

MAX_CLIENTS = 1 << 15
"""Clients beyond which buckets slide on a subset of the levels."""

PASSES, SLIDES = 6, 3
"""Most passes over all buckets of the search, and of the sliding after it."""

MOVES = 1536
"""Buckets examined in all passes together, beyond which there are fewer passes, but at least one."""

RUNGS = ((2048, 100), (4096, 60), (8192, 60))
"""Cells and steps of the ascents to the lower bound; each starts from the prices of the previous one."""

GOAL = 0.01
"""A gap that is small enough: 1% of the total cost."""

NEAR = 1.005
"""A second start is refined if its cost at the search's resolution is within this factor of the first one's."""


def solve(instance: Instance, counts: Sequence[int]) -> list[Found]:
    """Return a choice for each of the ascending `counts`; a larger count never costs more.

    On a coarse grid the search starts from the required buckets and those that coverage needs. It adds the one that
    saves most until there are enough, and exchanges single buckets while that helps. The buckets then slide and shrink
    at full resolution. Where the gap to the lower bound stays above GOAL, the buckets of the bound's relaxed solution
    are a second start.

    Every count must allow the buckets of `fewest_buckets` in addition to the required ones.
    """
    solver = _Solver(instance)
    results: list[Found] = []
    for graphs in counts:
        found = solver.choose(graphs)
        if results and results[-1].cost <= found.cost:
            found = Found(results[-1].buckets, results[-1].cost, found.bound)
        results.append(found)
    bound = 0.0
    for index in range(len(results) - 1, -1, -1):
        # if more buckets cannot cover it, fewer cannot either
        bound = max(bound, results[index].bound)
        results[index] = results[index]._replace(bound=bound)
    return results


class _Solver:
    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        levels = with_corners(instance, coarse_levels(instance, SEARCH_CELLS), MAX_CELLS)
        self._search = Search(_coverable(instance.coarser(levels)))
        self._sliding, cells = instance, 4 * MAX_CLIENTS
        while len(self._sliding.indices) > MAX_CLIENTS and cells > 1:
            self._sliding = _coverable(instance.coarser(coarse_levels(instance, cells)))
            cells //= 2
        buckets, costs = instance.cheapest(instance.indices)
        self._best: Points = np.unique(buckets[costs == instance.own], axis=0)
        self._duals: list[Dual] = []
        self._cover = fewest_buckets(instance)
        self._start = self._cover

    def choose(self, graphs: int) -> Found:
        if graphs >= len(self._instance.space.required) + len(self._best):
            cost = float((self._instance.own * self._instance.weights).sum())
            return Found(np.concatenate([self._best, self._instance.space.required]), cost, cost)
        coarse = self._searched(self._start, graphs)
        self._start = coarse.buckets
        best = self._finished(coarse.buckets, graphs)
        bound, hint = self._bound(best, graphs)
        if best.total > bound * (1 + GOAL):
            second = self._searched(hint, graphs)
            if second.total <= coarse.total * NEAR:
                best = min(best, self._finished(second.buckets, graphs), key=lambda serving: serving.total)
        return Found(best.buckets, best.total, bound)

    def _searched(self, start: Points, graphs: int) -> Serving:
        serving = Serving(self._search.instance, start)
        trim(serving, graphs)
        self._search.fill(serving, graphs)
        self._search.improve(serving, _passes(PASSES, graphs))
        return serving

    def _finished(self, buckets: Points, graphs: int) -> Serving:
        serving = Serving(self._sliding, buckets)
        cover(serving, graphs)
        shrink(serving)
        slide(serving, _passes(SLIDES, graphs))
        serving = Serving(self._instance, serving.buckets)
        cover(serving, graphs)
        if not serving.covers_all:
            serving = Serving(self._instance, self._cover)
            serving = spend(serving, graphs)
            slide(serving, _passes(SLIDES, graphs))
        shrink(serving)
        return spend(serving, graphs)

    def _bound(self, serving: Serving, graphs: int) -> tuple[float, Points]:
        """A lower bound for choices of as many buckets, and the buckets of its relaxed choice."""
        values, hint = serving.costs, serving.buckets
        if graphs == serving.fixed:
            return serving.total, hint
        best = serving.sum(self._instance.own) * (1 - ROUNDING)
        for rung, (cells, steps) in enumerate(RUNGS):
            if serving.total <= best * (1 + GOAL):
                break
            if rung == len(self._duals):
                self._duals.append(Dual(self._instance, coarse_levels(self._instance, cells)))
            bound, values, hint = self._duals[rung].ascend(values, graphs - serving.fixed, serving.total, steps)
            best = max(best, bound)
        return best, hint


def _passes(most: int, graphs: int) -> int:
    return max(1, min(most, MOVES // graphs))


def _coverable(instance: Instance) -> Instance:
    """The instance without clients that no bucket covers after rounding up; they are covered at full resolution."""
    return instance.only(np.isfinite(instance.own))
