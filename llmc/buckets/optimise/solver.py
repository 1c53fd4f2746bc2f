"""Least-cost buckets for a demand, for a given number of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.buckets.optimise import line, local_search
from llmc.buckets.optimise.demand import Demand
from llmc.buckets.optimise.instance import Found, Instance, fewest_buckets
from llmc.buckets.optimise.space import Space
from llmc.errors import InputError

PROVEN = 1e-8
"""A gap that rounding alone can cause: the choice is optimal."""


@dataclass(frozen=True)
class Choice:
    """Chosen buckets, ascending, and their quality.

    cost   Σ weight · cost of the cheapest bucket that covers the step
    bound  no choice of as many allowed buckets, including the required ones, costs less than this
    exact  whether `bound` proves the choice optimal, to 1 part in 10⁸
    """

    buckets: tuple[tuple[int, ...], ...]
    cost: float
    bound: float
    exact: bool

    @property
    def gap(self) -> float:
        """Upper bound on the relative excess of the cost over the optimum."""
        return self.cost / self.bound - 1 if self.bound else 0.0


def choose(space: Space, demand: Demand, graphs: int) -> Choice:
    """Return at most `graphs` buckets of the space, including its required ones, that serve the demand at the least
    cost.

    Exact where the demand, rounded up to the space's values, differs in only one dimension; elsewhere by local search,
    with a proven bound. Equal arguments give equal choices. The required buckets serve an empty demand.

    Raises InputError when no allowed bucket covers a step, and when `graphs` are too few for the required buckets or to
    cover the demand.
    """
    return frontier(space, demand, [graphs])[0]


def frontier(space: Space, demand: Demand, counts: Sequence[int]) -> list[Choice]:
    """Run `choose` for several numbers of graphs at once, in the order of `counts`; more graphs never cost more."""
    if min(counts) < 1:
        raise InputError(f"the number of graphs {min(counts)} must be at least 1")
    instance = Instance.of(space, demand)
    fixed, besides = len(space.required), len(fewest_buckets(instance))
    if min(counts) < fixed + besides:
        raise InputError(
            f"{min(counts)} graphs are too few: {fixed} buckets are required, and covering the demand takes {besides} "
            f"more; choose {fixed + besides} or more, or leave out the largest steps"
        )
    ordered = sorted(set(counts))
    if len(instance.indices):
        found = line.solve(instance, ordered) or local_search.solve(instance, ordered)
    else:
        found = [Found(space.required, 0.0, 0.0)] * len(ordered)
    choices = {graphs: _choice(result) for graphs, result in zip(ordered, found, strict=True)}
    return [choices[graphs] for graphs in counts]


def _choice(found: Found) -> Choice:
    bound = min(found.bound, found.cost)
    buckets = sorted({tuple(bucket) for bucket in found.buckets.tolist()})
    return Choice(tuple(buckets), found.cost, bound, found.cost <= bound * (1 + PROVEN))
