"""Two and three dimensions: a choice by local search, and how far from the best it can be at most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmc.buckets.optimise.bound import ROUNDING, Dual
from llmc.buckets.optimise.covering import fewest_buckets
from llmc.buckets.optimise.demand import Points
from llmc.buckets.optimise.instance import Found, Instance
from llmc.buckets.optimise.polish import cover, shrink, slide, spend
from llmc.buckets.optimise.resolution import coarse_levels, with_corners
from llmc.buckets.optimise.search import Search, trim
from llmc.buckets.optimise.serving import Serving

SEARCH_CELLS = 2048
"""Buckets of the grid on which the search exchanges any one for any other."""

MAX_CELLS = 8192
"""Buckets of that grid when it is extended so that the limits allow what the largest steps need."""

MAX_CLIENTS = 1 << 15
"""Clients beyond which buckets slide on levels that are fewer than all."""

PASSES, SLIDES = 6, 3
"""Most passes over all buckets of the search, and of the sliding after it."""

MOVES = 1536
"""Buckets looked at in those passes together, beyond which there are fewer passes, but always one."""

RUNGS = ((2048, 100), (4096, 60), (8192, 60))
"""Cells and steps of the ascents to the lower bound, each of which starts from the prices of the one before."""

GOAL = 0.01
"""A gap that is small enough: 1% of the total cost."""

NEAR = 1.005
"""A second start is followed up when it comes this near to the first one's cost at the search's resolution."""


def solve(instance: Instance, counts: Sequence[int]) -> list[Found]:
    """A choice for each of the ascending `counts`; a larger count never costs more.

    On a coarse grid the search starts from the required buckets and those that coverage needs, adds the one that saves
    most until there are enough, and exchanges single buckets while that helps. The buckets then slide and shrink at
    full resolution. Where the gap to the lower bound stays above GOAL, the buckets of the bound's relaxed solution are
    a second start.

    Every count must allow the buckets of `fewest_buckets` besides the required ones.
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
        # if more buckets cannot do it, fewer cannot either
        bound = max(bound, results[index].bound)
        results[index] = results[index]._replace(bound=bound)
    return results


class _Solver:
    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        levels = with_corners(instance, coarse_levels(instance, SEARCH_CELLS), MAX_CELLS)
        self._search = Search(_coverable(instance.coarser(levels)))
        self._sliding, cells = instance, 4 * MAX_CLIENTS
        while len(self._sliding.places) > MAX_CLIENTS and cells > 1:
            self._sliding = _coverable(instance.coarser(coarse_levels(instance, cells)))
            cells //= 2
        buckets, costs = instance.cheapest(instance.places)
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
        """A lower bound for choices of as many buckets, and those that its relaxation chooses."""
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
    """Without the clients that no bucket covers after rounding up; they are covered at full resolution."""
    return instance.only(np.isfinite(instance.own))
