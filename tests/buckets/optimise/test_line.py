"""The dynamic program of one dimension."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.optimise import line
from llmc.buckets.optimise.line import Line
from tests.buckets.generators import PROPERTY


def cost_of(problem: Line, indices) -> float:
    chosen = np.array(sorted(indices))
    server = chosen[np.searchsorted(chosen, np.arange(len(problem.costs)))]
    return float((problem.weights * problem.costs[server]).sum())


@st.composite
def lines(draw: st.DrawFn) -> Line:
    size = draw(st.integers(1, 9))
    costs = sorted(draw(st.lists(st.integers(1, 20), min_size=size, max_size=size)))
    weights = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    forced = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    forced[-1] = forced[-1] or not weights[-1]
    return Line(np.array(costs, float), np.array(weights, float), np.array(forced))


@PROPERTY
@given(lines())
def test_every_number_of_buckets_is_solved_exactly(problem):
    size = len(problem.costs)
    forced = set(np.flatnonzero(problem.forced).tolist()) | {size - 1}
    counts = range(len(forced), size + 2)
    for count, indices in zip(counts, problem.solve(counts), strict=True):
        assert len(indices) <= count
        assert set(indices.tolist()) >= forced
        others = [index for index in range(size) if index not in forced]
        free = range(min(count - len(forced), len(others)) + 1)
        best = min(cost_of(problem, [*forced, *more]) for number in free for more in combinations(others, number))
        assert cost_of(problem, indices) == best


@PROPERTY
@given(lines())
def test_hulls_walked_point_by_point_give_the_same(problem):
    counts = [len(problem.costs)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "ROUNDS", 0)
        walked = problem.solve(counts)
    assert walked[0].tolist() == problem.solve(counts)[0].tolist()


def test_equal_choices_are_settled_for_fewer_buckets_then_lower_locations():
    flat = Line(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 0.0, 1.0, 1.0]), np.zeros(4, bool))
    assert flat.solve([3])[0].tolist() == [0, 2, 3]
    even = Line(np.array([1.0, 2.0, 3.0]), np.ones(3), np.zeros(3, bool))
    assert even.solve([2])[0].tolist() == [0, 2]
    assert even.solve([9])[0].tolist() == [0, 1, 2]


def test_a_long_line_equals_the_quadratic_recurrence():
    rng = np.random.default_rng(5)
    size, count = 400, 20
    costs = np.cumsum(rng.integers(1, 9, size)).astype(float)
    weights = np.floor(rng.lognormal(0, 2, size)) + 1
    total = np.concatenate([[0.0], np.cumsum(weights)])
    best = np.concatenate([[0.0], np.full(size, np.inf)])
    for _ in range(count):
        options = best[None, :-1] + costs[:, None] * (total[1:, None] - total[None, :-1])
        options[np.triu_indices(size, 1)] = np.inf
        best = np.concatenate([[0.0], options.min(axis=1)])
    problem = Line(costs, weights, np.zeros(size, bool))
    assert cost_of(problem, problem.solve([count])[0]) == best[-1]


def test_steep_tails_do_not_slow_the_hull_down():
    """Weights that shrink while costs grow leave a hull that loses one point at a time."""
    costs = np.exp(np.linspace(0, 30, 5000))
    weights = np.exp(-np.linspace(0, 60, 5000))
    weights[-1] = 1.0
    indices = Line(costs, weights, np.zeros(5000, bool)).solve([8, 16])
    assert [len(each) for each in indices] == [8, 16]
