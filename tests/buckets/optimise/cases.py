"""Small problems whose best choice is found by trying all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from llmc.buckets.optimise.demand import Demand
from llmc.buckets.optimise.space import ListedSpace, ProductSpace, Space
from tests.buckets.generators import PROPERTY
from tests.tiers import examples

FEWER = examples(60, PROPERTY)
"""For properties of the parts, which those of the choice exercise too."""


@dataclass(frozen=True)
class Case:
    space: Space
    demand: Demand
    buckets: np.ndarray
    """All allowed buckets."""
    graphs: int

    def cost_of(self, buckets) -> float:
        """Σ weight · cost of the cheapest bucket that covers the step; infinite where none does."""
        table = np.array(buckets, np.int64).reshape(-1, len(self.space.values))
        covers = (table[None] >= self.demand.points[:, None]).all(2)
        served = np.where(covers, self.space.cost(table)[None], np.inf).min(1, initial=np.inf)
        return float((served * self.demand.weights).sum())

    def least_cost(self, graphs: int | None = None) -> float:
        """The cost of the best of all choices."""
        required = [tuple(bucket) for bucket in self.space.required.tolist()]
        others = [tuple(bucket) for bucket in self.buckets.tolist() if tuple(bucket) not in required]
        free = min((graphs or self.graphs) - len(required), len(others))
        return min(self.cost_of([*required, *chosen]) for chosen in combinations(others, free))


def power_cost(exponent: float):
    return lambda points: np.prod(points + 1.0, axis=1) ** exponent


@st.composite
def cases(draw: st.DrawFn, dimensions: tuple[int, ...] = (1, 2, 3)) -> Case:
    """At most about 30 buckets and 4 to choose besides at most 2 required ones; any part of it may be infeasible."""
    count = draw(st.sampled_from(dimensions))
    sizes = {1: 8, 2: 5, 3: 3}[count]
    values = [
        np.array(sorted(draw(st.lists(st.integers(1, 14), min_size=1, max_size=sizes, unique=True))))
        for _ in range(count)
    ]
    point = st.tuples(*[st.integers(0, int(each[-1])) for each in values])
    points = draw(st.lists(point, min_size=1, max_size=8))
    weights = draw(st.lists(st.integers(0, 5), min_size=len(points), max_size=len(points)))
    cost = power_cost(draw(st.sampled_from([0.5, 1.0, 2.0])))
    required = draw(st.lists(st.tuples(*[st.integers(1, 15)] * count), max_size=2, unique=True))
    grid = np.stack(np.meshgrid(*values, indexing="ij"), axis=-1).reshape(-1, count)
    space: Space
    if draw(st.booleans()):
        members = draw(st.lists(st.sampled_from(grid.tolist()), min_size=1, max_size=12))
        buckets = np.unique(np.array(members), axis=0)
        space = ListedSpace(buckets, cost, required)
    else:
        limit = draw(st.none() | st.integers(2, 300))
        allowed = None if limit is None else lambda points: points.prod(axis=1) <= limit
        buckets = grid if allowed is None else grid[allowed(grid)]
        space = ProductSpace(values, cost, allowed, required)
    return Case(space, Demand(np.array(points), weights), buckets, len(required) + draw(st.integers(0, 3)))
