"""The choice of buckets: as good as trying all, never below its bound, and the same every time."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given

from llmc.buckets.optimise import bound, local_search, serving
from llmc.buckets.optimise.demand import Demand
from llmc.buckets.optimise.solver import choose, frontier
from llmc.buckets.optimise.space import ListedSpace, ProductSpace
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY
from tests.buckets.optimise.cases import FEWER, Case, cases
from tests.tiers import full
from tests.timing import least_cpu_seconds


def tokens(points):
    """batch · query, or the length where there is nothing else."""
    return np.prod(points.astype(float), axis=1)


def solved(case: Case):
    """The choice for a case that has one."""
    assume(case.graphs > 0)
    try:
        return choose(case.space, case.demand, case.graphs)
    except InputError:
        assume(False)


def skewed_demand(batches: int, count: int = 4000) -> Demand:
    rng = np.random.default_rng(7)
    lengths = np.clip(np.exp(rng.normal(6.0, 1.0, count)), 1, 4096).astype(int)
    return Demand(np.stack([rng.integers(1, batches + 1, count), lengths], axis=1), np.ones(count))


@PROPERTY
@given(cases(dimensions=(1,)))
def test_in_one_dimension_the_choice_is_the_best_of_all(case):
    choice = solved(case)
    assert choice.exact
    assert choice.cost == pytest.approx(case.least_cost(), rel=1e-12)


@PROPERTY
@given(cases())
def test_the_best_choice_lies_between_the_bound_and_the_cost(case):
    choice = solved(case)
    best = case.least_cost()
    assert choice.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= choice.cost <= best * 1.05
    assert choice.gap >= 0
    if choice.exact:
        assert choice.cost == pytest.approx(best, rel=1e-7)


@PROPERTY
@given(cases())
def test_a_choice_has_the_required_buckets_and_only_allowed_others_and_costs_what_it_says(case):
    choice = solved(case)
    required = {tuple(bucket) for bucket in case.space.required.tolist()}
    allowed = {tuple(bucket) for bucket in case.buckets.tolist()}
    assert required <= set(choice.buckets) <= required | allowed
    assert len(choice.buckets) <= case.graphs
    assert list(choice.buckets) == sorted(set(choice.buckets))
    assert choice.cost == pytest.approx(case.cost_of(choice.buckets), rel=1e-12)


@FEWER
@given(cases(dimensions=(1, 2)))
def test_in_one_and_two_dimensions_a_choice_is_refused_only_where_there_is_none(case):
    assume(case.graphs > 0)
    try:
        choose(case.space, case.demand, case.graphs)
    except InputError:
        assert case.graphs < len(case.space.required) or case.least_cost() == np.inf


@FEWER
@given(cases())
def test_more_graphs_never_cost_more_and_bounds_fall_with_them(case):
    solved(case)
    counts = [case.graphs + 2, case.graphs, case.graphs + 1]
    most, least, middle = frontier(case.space, case.demand, counts)
    assert least.cost >= middle.cost >= most.cost
    assert least.bound >= middle.bound >= most.bound
    assert least.cost >= choose(case.space, case.demand, case.graphs + 1).cost * (1 - 1e-9)


@FEWER
@given(cases(dimensions=(2, 3)))
def test_bounds_and_costs_hold_at_any_resolution(case):
    """The search on a grid of about 6 buckets, the sliding on one of 4 clients, the bound on cells of several."""
    with (
        mock.patch.object(local_search, "SEARCH_CELLS", 6),
        mock.patch.object(local_search, "MAX_CELLS", 12),
        mock.patch.object(local_search, "MAX_CLIENTS", 4),
        mock.patch.object(local_search, "RUNGS", ((4, 20), (8, 20))),
        mock.patch.object(bound, "MAX_CORRECTIONS", 2),
        mock.patch.object(serving, "TOGETHER", 20),
        mock.patch.object(serving, "MAX_ROWS", 8),
    ):
        choice = solved(case)
    assert choice.cost == pytest.approx(case.cost_of(choice.buckets), rel=1e-12)
    assert choice.bound <= case.least_cost() * (1 + 1e-9) <= choice.cost * (1 + 2e-9)


def test_a_choice_of_real_size_is_near_its_bound_and_the_same_every_time():
    demand = skewed_demand(8)
    space = ProductSpace([np.arange(1, 9), np.arange(1, 4097)], tokens, None, [(8, 4096)])
    choice = choose(space, demand, 24)
    assert choice.gap < 0.03
    assert (8, 4096) in choice.buckets and len(choice.buckets) == 24
    order = np.random.default_rng(1).permutation(len(demand.points))
    shuffled = Demand(demand.points[order], demand.weights[order])
    assert choose(space, shuffled, 24) == choice


def test_a_frontier_of_real_size_is_near_its_bounds():
    space = ProductSpace([np.arange(1, 9), np.arange(1, 4097)], tokens, None, [(8, 4096)])
    choices = frontier(space, skewed_demand(8), [4, 8, 16, 32])
    assert all(choice.gap < 0.05 for choice in choices)
    assert [len(choice.buckets) for choice in choices] == [4, 8, 16, 32]


def test_three_dimensions_of_real_size_are_served_within_the_limits():
    rng = np.random.default_rng(3)
    count = 3000
    points = np.stack(
        [rng.integers(1, 9, count), rng.integers(1, 1025, count), 128 * rng.integers(0, 9, count) ** 2 // 4], axis=1
    )
    points = points[points[:, 0] * points[:, 1] <= 2048]
    values = [np.arange(1, 9), np.arange(1, 1025), np.arange(0, 4097, 128)]
    space = ProductSpace(
        values,
        lambda p: p[:, 0] * p[:, 1] * (4096.0 + p[:, 1] + p[:, 2]),
        lambda p: p[:, 0] * p[:, 1] <= 2048,
        [(1, 1024, 4096)],
    )
    demand = Demand(points, np.ones(len(points)))
    choice = choose(space, demand, 48)
    buckets = np.array(choice.buckets)
    assert (buckets[:, 0] * buckets[:, 1] <= 2048).all()
    assert Case(space, demand, buckets, 48).cost_of(choice.buckets) == pytest.approx(choice.cost, rel=1e-12)
    assert choice.gap < 0.6


@pytest.mark.parametrize("graphs", [8, 9, 12])
def test_steps_at_a_limit_are_covered_though_the_search_does_not_see_them(graphs):
    """Eight buckets are needed for the steps of exactly 840 tokens, which rounding up takes above the limit."""
    batches = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    largest = np.stack([batches, 840 // batches], axis=1)
    smaller = np.stack([batches, 840 // batches // 3], axis=1)
    space = ProductSpace([batches, np.arange(1, 841)], tokens, lambda points: points.prod(axis=1) <= 840)
    demand = Demand(np.concatenate([largest, smaller]), [*[1] * 8, *[1000] * 8])
    with mock.patch.object(local_search, "SEARCH_CELLS", 12), mock.patch.object(local_search, "MAX_CELLS", 12):
        choice = choose(space, demand, graphs)
    assert {tuple(bucket) for bucket in largest.tolist()} <= set(choice.buckets)
    assert len(choice.buckets) == graphs
    assert choice.cost == pytest.approx(Case(space, demand, largest, graphs).cost_of(choice.buckets), rel=1e-12)


def test_the_fewest_covering_buckets_are_found_where_the_search_goes_astray():
    """Two buckets can cover the large steps, but not if one of them is (4, 21), nor with one for the frequent step."""
    space = ProductSpace([range(1, 9), range(1, 41)], tokens, lambda points: points.prod(axis=1) <= 88)
    demand = Demand([[1, 40], [2, 21], [4, 11], [8, 5], [1, 1], [1, 2]], [2, 1, 2, 2, 1e6, 1e6])
    with mock.patch.object(local_search, "SEARCH_CELLS", 4), mock.patch.object(local_search, "MAX_CELLS", 4):
        choice = choose(space, demand, 2)
    assert choice.buckets == ((2, 40), (8, 11))


def test_with_required_buckets_alone_the_cost_is_known():
    choice = choose(ProductSpace([range(1, 9)] * 2, tokens, None, [(8, 8)]), Demand([[1, 2], [2, 1]], [1, 1]), 1)
    assert choice.buckets == ((8, 8),)
    assert choice.cost == choice.bound == 128 and choice.exact


def test_a_rules_plan_is_chosen_from_as_a_list():
    """Batches 1, 2, 4, 8 and lengths in steps of 128, as a rule makes them."""
    grid = np.stack(np.meshgrid([1, 2, 4, 8], np.arange(128, 4097, 128), indexing="ij"), axis=-1).reshape(-1, 2)
    space = ListedSpace(grid, tokens, [(8, 4096)])
    choice = choose(space, skewed_demand(8), 24)
    assert {tuple(bucket) for bucket in grid.tolist()} >= set(choice.buckets)
    assert choice.gap < 0.05


def test_enough_graphs_serve_every_step_by_its_own_bucket():
    points = [[2, 7], [3, 5], [3, 6]]
    choice = choose(ProductSpace([range(1, 9), range(1, 9)], tokens), Demand(points, [1, 2, 3]), 100)
    assert choice.buckets == ((2, 7), (3, 5), (3, 6))
    assert choice.cost == choice.bound == 14 + 2 * 15 + 3 * 18
    assert choice.exact and choice.gap == 0


def test_all_demand_at_one_point_takes_one_bucket():
    space = ProductSpace([[1, 2, 4], [64, 128]], tokens, None, [(4, 128)])
    choice = choose(space, Demand([[2, 65]] * 5, [1] * 5), 4)
    assert choice.buckets == ((2, 128), (4, 128))
    assert choice.cost == 5 * 256 and choice.exact


def test_a_constant_dimension_leaves_an_exact_problem():
    lengths = np.arange(1, 300)
    demand = Demand(np.stack([np.full(299, 3), lengths, np.zeros_like(lengths)], axis=1), lengths % 7)
    space = ProductSpace(
        [range(1, 9), range(1, 513), [0, 128]], lambda p: np.prod(p + 1.0, axis=1), None, [(8, 512, 0)]
    )
    choice = choose(space, demand, 12)
    assert choice.exact and len(choice.buckets) == 12
    assert {bucket[0] for bucket in choice.buckets} == {3, 8}


def test_numbers_of_a_million_are_no_problem():
    space = ProductSpace([[1, 10**6], np.arange(10**6, 2 * 10**6, 997)], tokens, None, [(10**6, 1999982)])
    demand = Demand([[1, 10**6 + 5], [10**6, 10**6 + 5], [7, 1_500_000]], [1e6, 1, 1e-6])
    choice = choose(space, demand, 4)
    assert choice.exact
    assert choice.cost == pytest.approx(1e6 * 1000997 + 1e6 * 1000997 + 1e-6 * 1e6 * 1500482)


def test_a_light_step_is_covered_even_where_that_costs_all_others_much():
    space = ProductSpace([range(1, 65), range(1, 1025)], tokens)
    choice = choose(space, Demand([[64, 1], [1, 1024], [1, 1000]], [1e-6, 1e6, 1e6]), 1)
    assert choice.buckets == ((64, 1024),)


def test_a_demand_of_nothing_is_served_by_the_required_buckets():
    space = ProductSpace([[1, 2], [8]], tokens, None, [(2, 8)])
    choice = choose(space, Demand([[1, 1]], [0]), 3)
    assert choice.buckets == ((2, 8),)
    assert (choice.cost, choice.bound, choice.gap, choice.exact) == (0, 0, 0, True)


def test_a_required_bucket_above_all_values_covers_what_no_other_does():
    choice = choose(ProductSpace([[1, 2], [8]], tokens, None, [(4, 16)]), Demand([[3, 9], [1, 2]], [1, 1]), 2)
    assert choice.buckets == ((1, 8), (4, 16))
    assert choice.cost == 64 + 8


@pytest.mark.parametrize("graphs", [0, -1])
def test_a_number_of_graphs_that_is_none_is_refused(graphs):
    with pytest.raises(InputError, match="number of graphs"):
        choose(ProductSpace([[1]], tokens), Demand([[1]], [1]), graphs)


def test_fewer_graphs_than_required_buckets_are_refused_with_the_least_number():
    space = ProductSpace([[1, 2, 4]], tokens, None, [(2,), (3,)])
    with pytest.raises(InputError, match="choose 3 or more"):
        choose(space, Demand([[4]], [1]), 2)


def test_fewer_graphs_than_the_limits_need_are_refused_with_the_least_number():
    space = ProductSpace([range(1, 9), range(1, 9)], tokens, lambda p: p.prod(axis=1) <= 8)
    demand = Demand([[8, 1], [4, 2], [2, 4], [1, 8]], [1, 1, 1, 1])
    with pytest.raises(InputError, match="choose 4 or more"):
        choose(space, demand, 3)
    assert choose(space, demand, 4).buckets == ((1, 8), (2, 4), (4, 2), (8, 1))


def test_a_step_that_nothing_covers_is_named():
    space = ProductSpace([range(1, 9), range(1, 9)], tokens, lambda p: p.prod(axis=1) <= 8)
    with pytest.raises(InputError, match=r"step \(4, 3\)"):
        choose(space, Demand([[1, 1], [4, 3]], [1, 1]), 4)
    with pytest.raises(InputError, match=r"step \(9, 1\)"):
        choose(space, Demand([[9, 1]], [1]), 4)


@full
def test_a_choice_takes_seconds_at_most():
    demand = skewed_demand(16, 20_000)
    space = ProductSpace([np.arange(1, 17), np.arange(1, 4097)], tokens, None, [(16, 4096)])
    assert least_cpu_seconds(lambda: choose(space, demand, 64), 1) < 10
