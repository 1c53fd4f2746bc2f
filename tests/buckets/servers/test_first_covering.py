"""Moves that lower the cost by the look-up of a server that takes the first covering shape."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.servers.base import Demand, Shape
from llmc.buckets.servers.first_covering import grid, polish, rounded, thinned


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
