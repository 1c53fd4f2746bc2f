"""Proposed lists: all of them are kept, nothing admissible misses, and they pad less than the server's own."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.integrations.base import GraphDemand, Lists, Setup, Shape
from llmc.integrations.vllm_gaudi.config import GaudiView
from llmc.integrations.vllm_gaudi.proposal import (
    NEVER,
    StepGrid,
    grid,
    polish,
    required_decodes,
    required_prompts,
    rounded,
    thinned,
    work,
)
from tests.integrations.vllm_gaudi.setups import GAUDI, setup, setups
from tests.tiers import examples, full


def admissible(built: Setup, data: st.DataObject) -> tuple[str, Shape]:
    """A step that can happen: prompts within the tokens of a step, decodes within max_model_len and the cache."""
    seen = GaudiView.of(built)
    if data.draw(st.booleans()):
        past = data.draw(st.integers(0, seen.longest_prompt - 1))
        new = data.draw(st.integers(1, min(seen.tokens, seen.longest_prompt - past)))
        batch = 1 if past else data.draw(st.integers(1, min(seen.prefill, seen.seqs, max(1, seen.tokens // new))))
        return "prompt", (batch, new, -(-past // seen.block))
    batch = data.draw(st.integers(1, seen.seqs))
    most = batch * seen.blocks_each
    if seen.contiguous:
        return "decode", (batch * (1 + seen.drafts), 1, data.draw(st.integers(2, seen.pool)))
    blocks = data.draw(st.integers(batch, max(batch, min(most, 3 * seen.pool))))
    return "decode", (batch * (1 + seen.drafts), 1, blocks * (1 + seen.drafts))


@examples(20)
@given(setups(), st.integers(3, 40), st.data())
def test_nothing_proposed_is_left_out_and_nothing_admissible_misses(
    built: Setup, most: int, data: st.DataObject
) -> None:
    steps: dict[str, dict[Shape, GraphDemand]] = {"prompt": {}, "decode": {}}
    for _ in range(data.draw(st.integers(0, 12))):
        family, shape = admissible(built, data)
        steps[family][shape] = GraphDemand(family, shape, data.draw(st.integers(1, 50)), 1)
    limits = {"prompt": most + 8, "decode": most}
    lists = GAUDI.propose(built, steps, limits)
    accepted = GAUDI.accept(built, lists)
    assert not accepted.dropped and accepted.lists == lists
    assert all(len(accepted.lists[family]) <= limits[family] for family in limits)
    for _ in range(20):
        family, shape = admissible(built, data)
        assert GAUDI.finder(built, family, accepted.lists[family]).find(shape).miss is None, shape


def padded(built: Setup, lists: Lists, steps: dict[str, dict[Shape, GraphDemand]]) -> int:
    total = 0
    for family, demands in steps.items():
        finder = GAUDI.finder(built, family, lists[family])
        for shape, demand in demands.items():
            found = finder.find(shape)
            assert found.miss is None
            total += demand.steps * GAUDI.work(built, family, found.shape)
    return total


@examples(20)
@given(
    st.lists(st.tuples(st.integers(1, 32), st.integers(1, 60), st.integers(1, 20)), min_size=4, max_size=60),
    st.booleans(),
)
def test_a_proposal_pads_no_more_than_the_servers_own_list(rows: list[tuple[int, int, int]], contiguous: bool) -> None:
    built = setup(8192, 32, 2048, contiguous_pa=contiguous)
    steps: dict[str, dict[Shape, GraphDemand]] = {"decode": {}, "prompt": {}}
    for batch, blocks, count in rows:
        shape = (batch, 1, batch * blocks + contiguous)
        steps["decode"][shape] = GraphDemand("decode", shape, count, 1)
        query = (1, 33 * blocks, batch)
        steps["prompt"][query] = GraphDemand("prompt", query, count, 1)
    own = GAUDI.default(built)
    lists = GAUDI.propose(built, steps, {family: len(shapes) for family, shapes in own.items()})
    assert padded(built, lists, steps) <= padded(built, own, steps)


@examples(15)
@given(setups(contiguous_pa=True, num_speculative_tokens=0), st.integers(1, 40), st.data())
def test_with_contiguous_attention_every_row_reaches_the_end_of_the_cache(
    built: Setup, most: int, data: st.DataObject
) -> None:
    """The runner looks a step up twice, by its blocks in use and by its highest block: both must end in one row."""
    seen = GaudiView.of(built)
    steps = {}
    for _ in range(data.draw(st.integers(1, 12))):
        shape = (data.draw(st.integers(1, seen.seqs)), 1, data.draw(st.integers(2, seen.pool)))
        steps[shape] = GraphDemand("decode", shape, data.draw(st.integers(1, 50)), 1)
    lists = GAUDI.propose(built, {"decode": steps}, {"prompt": 9, "decode": most})
    assert all((batch, 1, seen.pool) in lists["decode"] for batch, _, _ in lists["decode"])
    finder = GAUDI.finder(built, "decode", lists["decode"])
    for batch, _, highest in steps:
        used = data.draw(st.integers(1, highest - 1))
        padded_batch = finder.find((batch, 1, used)).shape[0]
        assert finder.find((padded_batch, 1, highest)).shape == finder.find((batch, 1, highest)).shape


def test_the_buckets_that_are_there_in_any_case() -> None:
    seen = GaudiView.of(setup(8192, 32, 2048, prompt_bs_max=3))
    assert required_prompts(seen) == [(1, 2048, 64), (2, 1024, 0), (3, 682, 0)]
    assert required_decodes(seen) == [(32, 1, 2048)]
    small = GaudiView.of(setup(8192, 32, 2048, num_hpu_blocks=600, contiguous_pa=True))
    assert required_decodes(small) == [(32, 1, 600)]


def test_too_few_graphs_are_refused() -> None:
    built = setup(prompt_bs_max=4)
    with pytest.raises(InputError, match="3 prompt buckets do not reach every admissible step; allow 4"):
        GAUDI.propose(built, {}, {"prompt": 3, "decode": 5})
    with pytest.raises(InputError, match="decode buckets do not reach"):
        GAUDI.propose(setup(num_speculative_tokens=1), {}, {"prompt": 3, "decode": 2})
    with pytest.raises(InputError, match="merged prefill"):
        GAUDI.propose(setup(merged_prefill=True), {}, {"prompt": 3, "decode": 2})


def test_queries_are_whole_blocks_of_128() -> None:
    built = setup(8192, 32, 2048)
    steps = {"prompt": {(1, 200, 0): GraphDemand("prompt", (1, 200, 0), 5, 1000)}, "decode": {}}
    assert GAUDI.propose(built, steps, {"prompt": 2, "decode": 1})["prompt"] == ((1, 256, 0), (1, 2048, 64))


def test_graphs_that_past_traffic_does_not_need_go_where_steps_may_yet_be() -> None:
    built = setup(8192, 32, 2048)
    steps = {"decode": {(1, 1, 2): GraphDemand("decode", (1, 1, 2), 10_000, 30_000)}}
    lists = GAUDI.propose(built, steps, {"prompt": 2, "decode": 20})
    assert lists["decode"][0] == (1, 1, 2)
    found = GAUDI.finder(built, "decode", lists["decode"]).find((9, 1, 200)).shape
    assert GAUDI.work(built, "decode", found) <= 1.25 * (9 + 200)


def served(shapes: list[Shape], requested: Shape) -> Shape:
    return next(shape for shape in sorted(shapes) if all(a >= b for a, b in zip(shape, requested, strict=True)))


STEPS = st.dictionaries(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 9).map(float), min_size=1)


@full
@given(STEPS, st.integers(1, 5), st.sets(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=4))
def test_moves_lower_the_cost_and_keep_what_is_required(
    steps: dict[Shape, float], most: int, start: set[Shape]
) -> None:
    top = (6, 6)
    chosen = [top, *sorted(start)[: most - 1]]
    candidates = [(row, column) for row in range(1, 7) for column in range(1, 7)]
    found = polish(steps, chosen, candidates, [top], most, lambda shape: float(sum(shape)))

    def total(shapes: list[Shape]) -> float:
        return sum(number * sum(served(shapes, requested)) for requested, number in steps.items())

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
    steps = {shape: GraphDemand("x", shape, 2, 0) for shape in ((1, 3), (2, 4), (2, 2))}
    assert rounded(steps, ([2], [2, 4])) == {(2, 4): 4.0, (2, 2): 2.0}


def cost(grid: StepGrid, points: tuple[tuple[int, int], ...]) -> float | None:
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
    grid = StepGrid(weights, costs, data.draw(st.booleans()))
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
    assert StepGrid(weights, costs).solve(1) == [(1, 2)]
    assert StepGrid(weights, costs).solve(2) == [(0, 0), (1, 2)]
