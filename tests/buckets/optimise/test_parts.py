"""The parts of the search: savings, servings, the lower bound, coarser levels, and the fewest covering buckets."""

from __future__ import annotations

import tracemalloc
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmc.buckets.optimise import serving as serving_module
from llmc.buckets.optimise.bound import Dual
from llmc.buckets.optimise.demand import Demand
from llmc.buckets.optimise.gains import FacilityLines
from llmc.buckets.optimise.instance import Instance, fewest_buckets, required_cover
from llmc.buckets.optimise.local_search import Search, coarse_levels, shrink, slide, spend, trim, with_corners
from llmc.buckets.optimise.serving import Serving
from llmc.buckets.optimise.space import ProductSpace, product
from llmc.errors import InputError
from tests.buckets.optimise.cases import FEWER, cases


def instance_of(case) -> Instance:
    assume(len(case.demand.points))
    try:
        return Instance.of(case.space, case.demand)
    except InputError:
        assume(False)


def some_levels(draw, instance: Instance) -> list[np.ndarray]:
    """Any of the levels, with the last of each dimension."""
    return [
        np.union1d(draw(st.lists(st.integers(0, size - 1), max_size=3)), [size - 1]).astype(np.int64)
        for size in instance.shape
    ]


@FEWER
@given(st.data())
def test_lines_give_what_each_facility_would_save(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    grid = product([np.arange(size) for size in shape])
    costs = np.prod(grid + 1.0, axis=1)
    costs[data.draw(st.lists(st.integers(0, len(grid) - 1), max_size=4))] = np.inf
    indices = grid[data.draw(st.lists(st.integers(0, len(grid) - 1), min_size=1, max_size=6, unique=True))]
    weights = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(indices), max_size=len(indices))), float)
    lines = FacilityLines(costs.reshape(shape), indices, weights)
    covers = (grid[:, None] >= indices[None]).all(axis=2)
    for _ in range(3):
        values = np.array(data.draw(st.lists(st.integers(0, 150), min_size=len(indices), max_size=len(indices))), float)
        saved = np.maximum(values[None] - costs[:, None], 0.0) * weights * covers
        assert lines.gains(values) == pytest.approx(saved.sum(axis=1), abs=1e-6)
        facilities, clients = lines.cheaper_than(values, 10**6)
        below = covers & (costs[:, None] < values[None])
        assert set(zip(facilities.tolist(), clients.tolist(), strict=True)) == set(zip(*np.nonzero(below), strict=True))


@FEWER
@given(cases(), st.data())
def test_a_serving_kept_up_to_date_equals_one_built_anew(case, data):
    instance = instance_of(case)
    assume(len(case.buckets))
    bucket = st.sampled_from(case.buckets.tolist()).map(np.array)
    serving = Serving(instance, case.buckets[:2])
    for _ in range(6):
        index = data.draw(st.integers(serving.fixed, max(len(serving) - 1, serving.fixed)))
        before = serving.total
        if len(serving) == serving.fixed or data.draw(st.booleans()):
            serving.add(data.draw(bucket))
            assert serving.total <= before
        elif data.draw(st.booleans()):
            serving.replace(index, data.draw(bucket))
        else:
            loss, without = serving.losses()[index], serving.sum(serving.costs_without(index))
            serving.drop(index)
            assert serving.total == pytest.approx(without)
            assert serving.total - before == pytest.approx(loss, abs=1e-9 * without)
        covers = (serving.buckets[None] >= instance.points(instance.indices)[:, None]).all(axis=2)
        costs = np.where(covers, case.space.cost(serving.buckets)[None], np.inf).min(axis=1, initial=np.inf)
        assert (serving.costs[np.isfinite(costs)] == costs[np.isfinite(costs)]).all()
        assert serving.covers_all == np.isfinite(costs).all()
        anew = Serving(instance, serving.buckets)  # which leaves out a second one of a required bucket
        if len(anew) == len(serving):
            assert serving.losses() == pytest.approx(anew.losses())


def test_of_many_pairs_the_start_of_each_stretch_is_kept():
    lines = FacilityLines(np.arange(1.0, 11.0), np.array([[0], [4]]), np.ones(2))
    every = list(zip(*map(list, lines.cheaper_than(np.array([9.0, 9.0]), 100)), strict=True))
    assert every == [*((at, 0) for at in range(8)), *((at, 1) for at in range(4, 8))]
    assert list(zip(*map(list, lines.cheaper_than(np.array([9.0, 9.0]), 6)), strict=True)) == [
        (0, 0), (1, 0), (2, 0), (4, 1), (5, 1), (6, 1),
    ]  # fmt: skip


def on_a_line(steps: int) -> Instance:
    space = ProductSpace([range(1, steps + 1)], lambda points: points[:, 0].astype(float), None, [(steps,)])
    return Instance.of(space, Demand([[step] for step in range(1, steps + 1)], np.ones(steps)))


def test_a_client_whose_second_bucket_is_replaced_gets_another_second_one():
    serving = Serving(on_a_line(8), np.array([[4], [6]]))
    serving.replace(serving.buckets[:, 0].tolist().index(6), np.array([1]))
    (four,) = np.flatnonzero(serving.buckets[:, 0] == 4)
    # without bucket 4, clients 2, 3 and 4 are served by 8
    assert serving.losses()[four] == 3 * (8 - 4)


def test_pairs_of_buckets_and_clients_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch):
    instance, buckets = on_a_line(4000), np.arange(1, 401)[:, None] * 10
    monkeypatch.setattr(serving_module, "TOGETHER", 1 << 16)
    tracemalloc.start()
    try:
        Serving(instance, buckets)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 400 * 4000 / 2, "each pair is a byte; all together would be 1.6 MB"


@FEWER
@given(cases(), st.data())
def test_no_prices_and_no_cells_give_a_bound_above_the_best_choice(case, data):
    instance = instance_of(case)
    free = case.graphs - len(case.space.required)
    assume(case.graphs > 0)
    best = case.least_cost()
    assume(np.isfinite(best))
    dual = Dual(instance, some_levels(data.draw, instance))
    size = len(instance.indices)
    values = np.array(data.draw(st.lists(st.floats(0, 1e4), min_size=size, max_size=size)))
    for steps in (0, 15):
        bound, prices, _ = dual.ascend(values, free, best * 1.1, steps)
        assert bound <= best * (1 + 1e-9)
        assert prices.shape == values.shape


def test_at_full_resolution_the_bound_reaches_the_best_choice():
    points = [[b, q] for b in (1, 2, 4) for q in (10, 20, 40, 80)]
    space = ProductSpace([[1, 2, 4], [10, 20, 40, 80]], lambda p: np.prod(p.astype(float), axis=1), None, [(4, 80)])
    instance = Instance.of(space, Demand(points, np.arange(1.0, 13.0)))
    costs = [Serving(instance, np.array(chosen, np.int64)).total for chosen in combinations(points[:-1], 3)]
    dual = Dual(instance, [np.arange(3), np.arange(4)])
    assert dual.ascend(instance.own * 1.5, 3, min(costs), 300)[0] >= 0.98 * min(costs)


@FEWER
@given(cases(), st.data())
def test_coarser_clients_are_the_same_steps_rounded_up(case, data):
    instance = instance_of(case)
    coarse = instance.coarser(some_levels(data.draw, instance))
    assert coarse.weights.sum() == pytest.approx(instance.weights.sum())
    assert (coarse.own * coarse.weights).sum() >= (instance.own * instance.weights).sum() * (1 - 1e-12)
    rounded = {tuple(point) for point in coarse.points(coarse.indices).tolist()}
    for point in instance.points(instance.indices):
        assert any((np.array(other) >= point).all() for other in rounded)


@FEWER
@given(cases(), st.integers(1, 40))
def test_coarse_levels_are_at_most_as_many_as_requested_and_hold_the_last(case, cells):
    instance = instance_of(case)
    levels = coarse_levels(instance, cells)
    for each, size in zip(levels, instance.shape, strict=True):
        assert each[-1] == size - 1 and (np.diff(each) > 0).all()
    several = [len(each) for each in levels if len(each) > 1]
    assert np.prod(several) <= max(cells, 2 ** len(several))
    if cells >= np.prod(instance.shape):
        assert [len(each) for each in levels] == list(instance.shape)


@FEWER
@given(cases())
def test_with_corners_every_step_stays_coverable(case):
    instance = instance_of(case)
    tops = [np.array([size - 1]) for size in instance.shape]
    coarse = instance.coarser(with_corners(instance, tops, 10**6))
    by_buckets = np.isfinite(instance.cheapest(instance.indices)[1])
    if by_buckets.all():
        assert np.isfinite(coarse.own).all()
    assert [len(each) for each in with_corners(instance, tops, 1)] == [1] * len(tops)


@FEWER
@given(cases())
def test_the_fewest_buckets_cover_what_the_required_ones_do_not(case):
    instance = instance_of(case)
    found = fewest_buckets(instance)
    points = instance.points(instance.indices)
    covered = (found[None] >= points[:, None]).all(axis=2).any(axis=1) | required_cover(instance)
    assert covered.all()
    if len(instance.levels) < 3 and len(found) < 4:
        left = points[~required_cover(instance)]
        for fewer in range(len(found)):
            for chosen in combinations(case.buckets, fewer):
                table = np.array(chosen, np.int64).reshape(fewer, points.shape[1])
                assert not (table[None] >= left[:, None]).all(axis=2).any(axis=1).all() or not len(left)


@FEWER
@given(cases(dimensions=(2, 3)))
def test_the_search_and_the_sliding_never_raise_the_cost(case):
    instance = instance_of(case)
    serving = Serving(instance, fewest_buckets(instance))
    graphs = len(serving) + 3
    search = Search(instance)
    totals = [serving.total]
    for step in (
        lambda: search.fill(serving, graphs),
        lambda: search.improve(serving, 3),
        lambda: slide(serving, 2),
    ):
        step()
        assert serving.covers_all and len(serving) <= graphs
        totals.append(serving.total)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(totals))
    trim(serving, serving.fixed)
    assert len(serving) == serving.fixed


def test_buckets_shrink_to_what_they_serve_and_those_that_serve_nothing_go():
    space = ProductSpace([range(1, 9)] * 2, lambda points: np.prod(points + 1.0, axis=1), None, [(8, 8)])
    instance = Instance.of(space, Demand([[2, 3], [3, 2], [8, 1]], [1, 1, 1]))
    serving = Serving(instance, np.array([[5, 5], [6, 6]]))
    shrink(serving)
    assert serving.buckets.tolist() == [[8, 8], [3, 3]]


def test_spare_buckets_go_to_the_clients_that_save_most_by_one_of_their_own():
    space = ProductSpace([range(1, 9)] * 2, lambda points: np.prod(points + 1.0, axis=1), None, [(8, 8)])
    instance = Instance.of(space, Demand([[8, 8], [2, 3], [3, 2], [8, 1]], [9, 5, 1, 1]))
    serving = Serving(instance, np.empty((0, 2), np.int64))
    own = [[8, 8], [2, 3], [3, 2], [8, 1]]
    for graphs in (1, 2, 3, 4):
        assert spend(serving, graphs).buckets.tolist() == own[:graphs]
    assert spend(serving, 9).buckets.tolist() == own, "a client whose bucket is chosen already saves nothing"
