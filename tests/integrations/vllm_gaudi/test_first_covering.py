"""Moves that lower the cost by the look-up of a server that takes the first covering shape."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.integrations.base import Demand, Shape
from llmc.integrations.vllm_gaudi.first_covering import NEVER, Grid, grid, polish, rounded, thinned
from llmc.integrations.vllm_gaudi.proposal import work
from tests.tiers import examples


def served(shapes: list[Shape], asked: Shape) -> Shape:
    return next(shape for shape in sorted(shapes) if all(a >= b for a, b in zip(shape, asked, strict=True)))


STEPS = st.dictionaries(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 9).map(float), min_size=1)


@given(STEPS, st.integers(1, 5), st.sets(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=4))
def test_moves_lower_the_cost_and_keep_what_is_required(
    steps: dict[Shape, float], most: int, start: set[Shape]
) -> None:
    top = (6, 6)
    chosen = [top, *sorted(start)[: most - 1]]
    candidates = [(row, column) for row in range(1, 7) for column in range(1, 7)]
    found = polish(steps, chosen, candidates, [top], most, lambda shape: float(sum(shape)))

    def total(shapes: list[Shape]) -> float:
        return sum(number * sum(served(shapes, asked)) for asked, number in steps.items())

    assert top in found and len(found) <= max(most, len(set(chosen)))
    assert total(found) <= total(chosen)


def test_an_exchange_finds_what_rows_that_reach_their_steps_cannot() -> None:
    """One step of row 1 is so long that it is better served in row 2: rows that all reach their steps cost more."""
    steps = {(1, 1): 50.0, (1, 9): 1.0, (2, 9): 50.0}
    rows, columns = [1, 2], [1, 9]
    chosen = grid(steps, rows, columns, lambda row, column: float(row + column), 2)
    assert chosen == [(2, 1), (2, 9)]
    found = polish(steps, chosen, [(1, 1), (1, 9)], [(2, 9)], 2, lambda shape: float(sum(shape)))
    assert found == [(1, 1), (2, 9)]


def test_quantiles_stand_for_many_values() -> None:
    values = dict.fromkeys(range(1, 101), 1.0)
    assert thinned(values, 4, [200]) == [25, 50, 75, 100, 200]
    assert thinned({3: 1.0, 1: 5.0}, 4) == [1, 3]


def test_steps_are_rounded_up_to_the_axes() -> None:
    steps = {shape: Demand("x", shape, 2, 0) for shape in ((1, 3), (2, 4), (2, 2))}
    assert rounded(steps, ([2], [2, 4])) == {(2, 4): 4.0, (2, 2): 2.0}


def cost(grid: Grid, points: tuple[tuple[int, int], ...]) -> float | None:
    """The total of all steps, each in the least chosen row at or above its own, and there the least column; None where
    a row does not reach its steps."""
    total = 0.0
    for (row, column), weight in np.ndenumerate(grid.weights):
        if not weight:
            continue
        rows = [r for r, _ in points if r >= row]
        columns = [c for r, c in points if rows and r == min(rows) and c >= column]
        if not columns or grid.costs[min(rows), min(columns)] >= NEVER:
            return None
        total += weight * grid.costs[min(rows), min(columns)]
    return total


@examples(80)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.data())
def test_no_choice_costs_less(rows: int, columns: int, most: int, data: st.DataObject) -> None:
    def table(cells: st.SearchStrategy[float]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        row = st.lists(cells, min_size=columns, max_size=columns)
        return np.array(data.draw(st.lists(row, min_size=rows, max_size=rows)), np.float64)

    weights = table(st.sampled_from([0.0, 1.0, 3.0]))
    rising = np.cumsum(table(st.integers(1, 5).map(float)), axis=1)
    costs = np.maximum.accumulate(rising, axis=0)
    if data.draw(st.booleans()) and rows > 1:
        costs[0, 0] = NEVER
    grid = Grid(weights, costs, data.draw(st.booleans()))
    cells = [(r, c) for r in range(rows) for c in range(columns)]
    top = (rows - 1, columns - 1)
    tops = {row: (row, columns - 1) for row in range(rows)}
    choices = [
        choice for count in range(1, most + 1) for choice in combinations(cells, count)
        if top in choice and all(costs[point] < NEVER for point in choice)
        and (not grid.full or all(tops[row] in choice for row, _ in choice))
    ]  # fmt: skip
    best = min(found for choice in choices if (found := cost(grid, choice)) is not None)
    solved = grid.solve(most)
    assert len(solved) <= most and top in solved
    assert cost(grid, tuple(solved)) == pytest.approx(best)


def test_rows_are_given_up_where_graphs_are_few() -> None:
    weights = np.array([[9.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    costs = np.array([[work("decode", (row, 1, column)) for column in (1, 4, 8)] for row in (1, 8)], np.float64)
    assert Grid(weights, costs).solve(1) == [(1, 2)]
    assert Grid(weights, costs).solve(2) == [(0, 0), (1, 2)]
