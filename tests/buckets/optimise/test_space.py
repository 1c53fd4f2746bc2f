"""Spaces: the cheapest bucket that covers a point, and the cheapest of a cell."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from llmc.buckets.optimise import space
from llmc.buckets.optimise.space import ListedSpace, ProductSpace
from tests.buckets.optimise.cases import FEWER, cases, power_cost

COST = power_cost(1.0)


@FEWER
@given(cases(), st.data())
def test_the_cheapest_bucket_is_that_of_all_allowed_ones(case, data):
    count = len(case.space.values)
    points = np.array(data.draw(st.lists(st.tuples(*[st.integers(0, 16)] * count), min_size=1, max_size=5)))
    buckets, costs = case.space.cheapest(points)
    for point, bucket, cost in zip(points, buckets, costs, strict=True):
        covering = case.buckets[(case.buckets >= point).all(axis=1)]
        assert cost == case.space.cost(covering).min(initial=np.inf)
        if len(covering):
            assert (bucket >= point).all() and bucket.tolist() in covering.tolist()


@FEWER
@given(cases(), st.data())
def test_no_bucket_of_a_cell_costs_less_than_the_cells_least_cost(case, data):
    lows = []
    for _ in case.space.values:
        starts = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=4, unique=True))
        lows.append(np.array(sorted(starts)))
    costs = case.space.least_costs(lows)
    expected = np.full(costs.shape, np.inf)
    for bucket, cost in zip(case.buckets, case.space.cost(case.buckets), strict=True):
        cell = tuple(int(np.searchsorted(low, value, "right")) - 1 for low, value in zip(lows, bucket, strict=True))
        if min(cell) >= 0:
            expected[cell] = min(expected[cell], cost)
    assert (costs == expected).all()


@FEWER
@given(cases())
def test_a_list_too_long_for_a_table_is_searched_and_gives_the_same(case):
    assume(len(case.buckets))
    table = ListedSpace(case.buckets, COST)
    points = space.product([np.append(each, each[-1] + 1) for each in table.values])
    with mock.patch.object(space, "MAX_CORNERS", 0), mock.patch.object(space, "ROWS_A_SEARCH", 3):
        buckets, costs = ListedSpace(case.buckets, COST).cheapest(points)
    expected = table.cheapest(points)
    assert (costs == expected[1]).all()
    assert (buckets[np.isfinite(costs)] == expected[0][np.isfinite(costs)]).all()


def test_required_buckets_are_sorted_and_distinct():
    assert ProductSpace([[1]], COST, None, [(9,), (4,), (9,)]).required.tolist() == [[4], [9]]
