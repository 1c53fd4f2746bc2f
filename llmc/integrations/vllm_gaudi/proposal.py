"""The lists of least padding under the server's own look-up, none of which its filters drop.

`StepGrid` solves rows of columns exactly; then `polish` moves single buckets. The server takes the least prepared row
at or above a step's, and there the least column at or above the step's. Rows R1 < R2 < … with their own columns
therefore cost the sum of each row's steps on its own line.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from llmc.errors import InputError
from llmc.integrations.base import GraphDemand, Lists, Shape
from llmc.integrations.vllm_gaudi import sizes
from llmc.integrations.vllm_gaudi.config import CLAMP, DECODE, PROMPT, GaudiView

Floats = NDArray[np.float64]
Tables = tuple[Floats, NDArray[np.int64]]

AHEAD = 32
"""Tables are made for multiples of this many points."""
MOST_IN_ROW = 40
"""Columns that a row may have in any case; with few rows it may have four times its share of all points."""

NEVER = 1e15
"""Cost of points that must not be chosen: above any sum of real costs, and finite, so that its products are not NaN."""


@dataclass(frozen=True, eq=False)
class StepGrid:
    """Steps on a grid of rows and columns, both ascending, and the cost of one run at each point.

    weights  float64 [rows, columns], at least 0: how often steps round up to the point
    costs    float64 [rows, columns], ascending along a row; `NEVER` where there can be no shape
    full     whether every chosen row has the last column; otherwise it reaches its own last step

    The last point of all is always chosen. No step leaves its row.
    """

    weights: Floats
    costs: Floats
    full: bool = False
    _known: list[Tables] = field(default_factory=list, init=False, repr=False)

    def solve(self, most: int) -> list[tuple[int, int]]:
        """Return at most `most` points of least total cost, as (row, column), ascending.

        E_k(b) is the least cost of all rows up to b with at most k points, b the last chosen row: min over a < b and j
        of E_{k−j}(a) + C_j(a, b), with C_j(a, b) the cost of j columns for the steps of the rows above a up to b, all
        in row b. Exact for rows of as many columns as MOST_IN_ROW allows, and O(rows² · columns² · most).
        """
        rows = len(self.weights)
        best, sources = self._tables(most)
        count, end = int(np.argmin(best[rows, : most + 1])), rows
        points: list[tuple[int, int]] = []
        while end:
            start, used = sources[end, count].tolist()
            points += [(end - 1, column) for column in self._columns(start, end - 1, used)]
            count, end = count - used, start
        return sorted(points)

    def _tables(self, most: int) -> Tables:
        """E_k(b), and the (a, j) that it is reached from, for k up to `most` or more; smaller numbers use them too."""
        if self._known and self._known[0][0].shape[1] > most:
            return self._known[0]
        most = -(-most // AHEAD) * AHEAD
        rows, columns = self.weights.shape
        layers = min(most, columns, max(MOST_IN_ROW, 4 * most // rows))
        best = np.full((rows + 1, most + 1), NEVER)
        best[0] = 0.0
        sources = np.zeros((rows + 1, most + 1, 2), np.int64)
        for end in range(rows):
            totals = self._row(end, layers)
            for start in range(end + 1):
                for count in range(1, layers + 1):
                    reached = best[start, : most + 1 - count] + totals[start, count]
                    better = np.flatnonzero(reached < best[end + 1, count:])
                    best[end + 1, count + better] = reached[better]
                    sources[end + 1, count + better] = start, count
        self._known[:] = [(best, sources)]
        return best, sources

    def _prefixes(self, end: int, start: int | None = None) -> Floats:
        """[starts, columns + 1]: cumulated weights of the rows start … `end`, for each start up to `end` or for one."""
        sums = np.cumsum(self.weights[end::-1], axis=0)[::-1]
        chosen = sums if start is None else sums[start : start + 1]
        return np.concatenate([np.zeros((len(chosen), 1)), np.cumsum(chosen, axis=1)], axis=1)

    def _layers(self, end: int, prefix: Floats, layers: int) -> list[Floats]:
        """For 1, 2 … columns in row `end`: [starts, columns + 1] the least cost of serving all up to the last one."""
        costs = self.costs[end]
        allowed = np.tril(np.ones((len(costs), len(costs) + 1), bool))
        current = np.full(prefix.shape, NEVER)
        current[:, 0] = 0.0
        found = []
        for _ in range(layers):
            moved = current[:, None, :] - costs[None, :, None] * prefix[:, None, :]
            least = np.where(allowed, moved, NEVER).min(axis=2)
            following = np.where(costs < NEVER, np.minimum(least + costs * prefix[:, 1:], NEVER), NEVER)
            current = np.concatenate([np.full((len(prefix), 1), NEVER), following], axis=1)
            found.append(current)
        return found

    def _ends(self, end: int, prefix: Floats) -> NDArray[np.bool_]:
        """[starts, columns + 1]: possible last columns of row `end`: no step is beyond it."""
        ends: NDArray[np.bool_] = np.equal(prefix, prefix[:, -1:])
        if self.full or end == len(self.weights) - 1:
            ends[:, :-1] = False
        return ends

    def _row(self, end: int, layers: int) -> Floats:
        """[starts, layers + 1]: the least cost of the rows start … `end`, all in row `end`, by number of columns."""
        prefix = self._prefixes(end)
        ends = self._ends(end, prefix)
        found = [np.where(ends, layer, NEVER).min(axis=1) for layer in self._layers(end, prefix, layers)]
        return np.stack([np.full(len(prefix), NEVER), *found], axis=1)

    def _columns(self, start: int, end: int, count: int) -> list[int]:
        """The `count` columns of row `end` that serve the rows `start` … `end` at the least cost."""
        prefix = self._prefixes(end, start)
        layers = self._layers(end, prefix, count)
        index = int(np.argmin(np.where(self._ends(end, prefix)[0], layers[-1][0], np.inf)))
        columns = []
        for layer in range(count - 1, -1, -1):
            columns.append(index - 1)
            if layer:
                cost = self.costs[end, index - 1]
                index = int(np.argmin(layers[layer - 1][0, :index] - cost * prefix[0, :index]))
        return columns


Ints = NDArray[np.int64]

ROWS, COLUMNS = 16, 120
"""Most values of each of the two numbers that are chosen from: quantiles of the steps where there are more."""

ROUNDS = 40
"""Most moves of the polish; each lowers the cost."""


def thinned(values: Mapping[int, float], most: int, required: Iterable[int] = ()) -> list[int]:
    """Return about `most` of the weighted `values`: all if few, otherwise quantiles; and `required`."""
    ordered = sorted(values)
    if len(ordered) > most:
        sums = np.cumsum([values[value] for value in ordered])
        indices = np.searchsorted(sums, np.linspace(0, sums[-1], most + 1)[1:] * (1 - 1e-12))
        ordered = [ordered[index] for index in sorted({*indices.tolist(), len(ordered) - 1})]
    return sorted({*ordered, *required})


def grid(
    steps: Mapping[tuple[int, int], float],
    rows: Sequence[int],
    columns: Sequence[int],
    cost: Callable[[int, int], float | None],
    most: int,
    *,
    full: bool = False,
) -> list[tuple[int, int]]:
    """Return at most `most` of (row, column) that serve `steps` at the least cost where no step leaves its row.

    Rows and columns ascend, and their last ones cover all steps; that point is always chosen. With `full`, so is the
    last column of every chosen row. `cost` of a point is that of one run, None where there can be no such shape.
    """
    known = [[cost(row, column) for column in columns] for row in rows]
    costs = np.array([[NEVER if value is None else value for value in row] for row in known], np.float64)
    weights = np.zeros(costs.shape)
    for (row, column), number in steps.items():
        weights[bisect_left(rows, row), bisect_left(columns, column)] += number
    found = _known_grid(weights.tobytes(), costs.tobytes(), len(rows), full).solve(most)
    return [(rows[row], columns[column]) for row, column in found]


@lru_cache(maxsize=8)
def _known_grid(weights: bytes, costs: bytes, rows: int, full: bool) -> StepGrid:
    """The grid of these float64 values. Proposals of several sizes for the same steps share its tables."""

    def shaped(values: bytes) -> Floats:
        return np.frombuffer(values, np.float64).reshape(rows, -1)

    return StepGrid(shaped(weights), shaped(costs), full)


def rounded(demands: Mapping[Shape, GraphDemand], axes: Sequence[Sequence[int]]) -> dict[Shape, float]:
    """Return steps by shape, each number rounded up to the next of its axis (ascending, the last one above all)."""
    found: dict[Shape, float] = {}
    for shape, demand in demands.items():
        point = tuple(axis[bisect_left(axis, number)] for axis, number in zip(axes, shape, strict=True))
        found[point] = found.get(point, 0.0) + demand.steps
    return found


def polish(
    steps: Mapping[Shape, float],
    chosen: Iterable[Shape],
    candidates: Iterable[Shape],
    required: Iterable[Shape],
    most: int,
    cost: Callable[[Shape], float],
) -> list[Shape]:
    """Return `chosen` after moves that lower the cost by the server's own look-up.

    A move adds one of `candidates` while there are fewer than `most`, drops one, or exchanges one for another.
    `required` ones stay.
    """
    points = np.array(list(steps), np.int64)
    weights = np.array(list(steps.values()), np.float64)
    fixed = set(required)
    shapes = sorted({*chosen, *fixed, *candidates})
    costs = np.array([cost(shape) for shape in shapes])
    indices = {shape: index for index, shape in enumerate(shapes)}
    covers: NDArray[np.bool_] = np.all(np.array(shapes, np.int64)[:, None, :] >= points[None, :, :], axis=2)
    kept = sorted(indices[shape] for shape in {*chosen, *fixed})
    locked = {indices[shape] for shape in fixed}
    total = _cost(kept, covers, costs, weights)
    for _ in range(ROUNDS):
        move = _best_move(kept, locked, covers, costs, weights, most)
        if move is None:
            break
        after = _cost(move, covers, costs, weights)
        if after >= total:
            break
        kept, total = move, after
    return [shapes[index] for index in kept]


def _first(kept: Sequence[int], covers: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """The index in `kept` that serves each point, and whether one does."""
    rows = covers[list(kept)]
    served: NDArray[np.bool_] = np.any(rows, axis=0)
    return np.argmax(rows, axis=0), served


def _cost(
    kept: Sequence[int], covers: NDArray[np.bool_], costs: NDArray[np.float64], weights: NDArray[np.float64]
) -> float:
    first, served = _first(kept, covers)
    return float((weights * np.where(served, costs[np.array(kept)[first]], NEVER)).sum())


def _best_move(
    kept: list[int],
    locked: set[int],
    covers: NDArray[np.bool_],
    costs: NDArray[np.float64],
    weights: NDArray[np.float64],
    most: int,
) -> list[int] | None:
    """`kept` after the best addition, or the best exchange where it is full; None if none helps."""
    if len(kept) < most:
        index, change = _best_addition(kept, covers, costs, weights)
        return sorted([*kept, index]) if change < 0 else None
    first, _ = _first(kept, covers)
    loads = np.bincount(first, weights, len(kept))
    losses = []
    for position, index in enumerate(kept):
        if index in locked:
            continue
        rest = [other for other in kept if other != index]
        if loads[position] == 0:
            losses.append((0.0, index))
            continue
        touched = first == position
        losses.append((_cost(rest, covers[:, touched], costs, weights[touched])
                       - float((weights[touched] * costs[index]).sum()), index))  # fmt: skip
    for loss, index in sorted(losses)[:3]:
        rest = [other for other in kept if other != index]
        added, change = _best_addition(rest, covers, costs, weights)
        if change + loss < -1e-9:
            return sorted([*rest, added])
    return None


def _best_addition(
    kept: list[int], covers: NDArray[np.bool_], costs: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[int, float]:
    """The candidate that lowers the cost most when it is added, and the change (negative)."""
    first, served = _first(kept, covers)
    index = np.where(served, np.array(kept)[first], len(costs))
    paid = np.where(served, costs[np.minimum(index, len(costs) - 1)], NEVER)
    taken = covers & (np.arange(len(costs))[:, None] < index[None, :])
    changes = taken @ -(weights * paid) + costs * (taken @ weights)
    best = int(np.argmin(changes))
    return best, float(changes[best])


ALIGNED = 128
"""Queries are multiples of this many tokens, like all that the plug-in generates with its block size."""

UNSEEN = 0.001
"""Share of all decode steps that counts again, spread over the server's own buckets. Future traffic differs from the
past, so graphs that would save almost nothing are placed where steps may occur."""

Demands = Mapping[Shape, GraphDemand]


def work(family: str, shape: Shape) -> int:
    """Return the cost of one run of a bucket: batch · (query + context) of a prompt, batch + blocks of a decode.

    A new token, or a decode's row, passes all layers; a context block is read by attention. Both count 1, so neither is
    free: a bucket with an unnecessarily large context, or unnecessary rows, is never as good as a tight one.
    """
    batch, query, context = shape
    return batch * (query + context) if family == PROMPT else batch + context


def propose(view: GaudiView, demands: Mapping[str, Demands], most: Mapping[str, int]) -> Lists:
    """Return the buckets to prepare, including those for drafts.

    Raises InputError where `most` buckets do not reach every admissible step.
    """
    if view.merged:
        raise InputError("vllm-gaudi: no lists are planned for merged prefill; leave VLLM_MERGED_PREFILL out")
    return {
        PROMPT: _prompt(view, demands.get(PROMPT, {}), most[PROMPT]),
        DECODE: tuple(sorted(sizes.with_drafts(view, _decode(view, demands.get(DECODE, {}), most[DECODE])))),
    }


def _aligned(number: int, most: int) -> int:
    return min(-(-number // ALIGNED) * ALIGNED, most)


def _check(family: str, needed: int, most: int) -> None:
    if needed > most:
        raise InputError(f"vllm-gaudi: {most} {family} buckets do not reach every admissible step; allow {needed}")


def required_prompts(view: GaudiView) -> list[Shape]:
    """Return the buckets that cover all admissible prefills, independent of others.

    One sequence with the longest query and the longest context. For each larger batch, which runs without context, the
    longest query that max_num_batched_tokens admits.
    """
    longest = min(view.longest_prompt, view.tokens)
    ceiling = min(view.tokens, view.model_len)
    context = -(-(view.longest_prompt - 1) // view.block)
    found = [(1, _aligned(longest, ceiling), context)]
    for batch in range(2, min(view.prefill, view.seqs, view.tokens) + 1):
        found.append((batch, min(_aligned(longest, ceiling), view.tokens // batch), 0))
    return [_sliced(view, shape) for shape in found]


def _sliced(view: GaudiView, shape: Shape) -> Shape:
    """A prompt bucket without context that a server with sliced long prompts keeps; it would drop others."""
    if not sizes.unsliced(view, shape):
        return shape
    size = view.number("sdpa_slice")
    batch, query, _ = shape
    longer = -(-query // size) * size
    return (batch, longer, 0) if not sizes.refused_prompt(view, (batch, longer, 0)) else (batch, query, 1)


def required_decodes(view: GaudiView) -> list[Shape]:
    """Return the bucket that covers all admissible decode steps, before drafts.

    All sequences with their most blocks. With contiguous PA at most the blocks of the cache. Without it at most three
    times that, since sequences share cached blocks; the server's own list also ends there.
    """
    if view.contiguous:
        return [(view.seqs, 1, view.pool)]
    worst = view.seqs * view.blocks_each
    most = worst if view.own["unbounded_decode_blocks"] else min(worst, view.pool * CLAMP)
    return [(view.seqs, 1, max(most, view.seqs))]


def _prompt(view: GaudiView, demands: Demands, most: int) -> tuple[Shape, ...]:
    required = required_prompts(view)
    _check(PROMPT, len(required), most)
    _, longest, context = required[0]
    ceiling = min(view.tokens, view.model_len)
    batches = sorted({1, *(shape[0] for shape in demands)})
    queries = thinned(
        _weights((_aligned(shape[1], ceiling), demand) for shape, demand in demands.items()), ROWS, [longest]
    )
    contexts = thinned(_weights((shape[2], demand) for shape, demand in demands.items()), COLUMNS, [0, context])

    def cost(query: int, context: int) -> float | None:
        return work(PROMPT, (1, query, context)) if _accepted_prompt(view, (1, query, context)) else None

    steps = rounded(demands, (batches, queries, contexts))
    alone = {(query, context): number for (batch, query, context), number in steps.items() if batch == 1}
    share = max(1, (most - len(required) + 1) * len(alone) // max(1, len(steps)))
    chosen = [(1, *point) for point in grid(alone, queries, contexts, cost, share)] if alone else []
    candidates = product(batches, queries, contexts)
    allowed = [shape for shape in candidates if _accepted_prompt(view, shape) and (shape[0] == 1 or not shape[2])]
    return _polished(PROMPT, steps, chosen, allowed, required, most)


def _accepted_prompt(view: GaudiView, shape: Shape) -> bool:
    return not sizes.refused_prompt(view, shape) and not sizes.unsliced(view, shape)


def _decode(view: GaudiView, demands: Demands, most: int) -> set[Shape]:
    """The seeds: with k drafts a step of n · (k + 1) rows is one of n sequences, and each seed gives three buckets.

    With contiguous PA every row reaches the end of the cache. There the runner takes the batch from one look-up, by the
    blocks in use, and the blocks from a second one, by the highest id. Where these end in different rows it runs the
    batch of one with the blocks of the other, a graph that may be missing.
    """
    each = 3 if view.drafts else 1
    _check(DECODE, each, most)
    required = required_decodes(view)
    top = required[0][2]
    merged = _seeded(view, demands, top)
    rows = thinned(_weights((shape[0], demand) for shape, demand in merged.items()), ROWS, [view.seqs])
    columns = thinned(_weights((shape[2], demand) for shape, demand in merged.items()), COLUMNS, [top])

    def cost(batch: int, blocks: int) -> float:
        return work(DECODE, _fitted(view, (batch, 1, blocks)))

    exponential = sizes.decode_ranges(replace(view, own={**view.own, "exponential_bucketing": True}))
    own = [shape for shape in sizes.decode_buckets(view, exponential) if shape[2] <= top]
    rows = sorted({*rows, *(batch for batch, _, _ in own)})
    columns = sorted({*columns, *(blocks for _, _, blocks in own)})
    steps = rounded(merged, (rows, [1], columns))
    weight = UNSEEN * sum(steps.values()) / len(own)
    for shape in own if weight else ():
        steps[shape] = steps.get(shape, 0.0) + weight
    counted = {(batch, blocks): number for (batch, _, blocks), number in steps.items()}
    points = grid(counted, rows, columns, cost, most // each, full=view.contiguous)
    if view.contiguous:
        rows = sorted({batch for batch, _ in points})
        required = [_fitted(view, (batch, 1, top)) for batch in rows]
    chosen = [_fitted(view, (batch, 1, blocks)) for batch, blocks in points]
    candidates = [_fitted(view, (batch, 1, blocks)) for batch in rows for blocks in columns]
    return set(_polished(DECODE, steps, chosen, candidates, required, most // each))


def _seeded(view: GaudiView, demands: Demands, top: int) -> Demands:
    """Steps of sequences without their drafts, with at most `top` blocks."""
    tokens = 1 + view.drafts
    found: dict[Shape, GraphDemand] = {}
    for shape, demand in demands.items():
        batch = -(-shape[0] // tokens)
        blocks = shape[2] if view.contiguous else max(batch, -(-shape[2] // tokens))
        seed = (min(batch, view.seqs), 1, min(blocks, top))
        known = found.get(seed)
        found[seed] = GraphDemand(DECODE, seed, demand.steps + (known.steps if known else 0), 0)
    return found


def _fitted(view: GaudiView, shape: Shape) -> Shape:
    """A decode bucket that the server keeps unchanged: at least a block for each sequence, at most max_model_len's."""
    batch, query, blocks = shape
    return sizes.clipped(view, (batch, query, blocks if view.contiguous else max(batch, blocks)))


def _weights(steps: Iterable[tuple[int, GraphDemand]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for value, demand in steps:
        found[value] = found.get(value, 0.0) + demand.steps
    return found


def _polished(
    family: str,
    steps: Mapping[Shape, float],
    chosen: Iterable[Shape],
    candidates: Iterable[Shape],
    required: Iterable[Shape],
    most: int,
) -> tuple[Shape, ...]:
    if not steps:
        return tuple(sorted({*chosen, *required}))
    return tuple(sorted(polish(steps, chosen, candidates, required, most, lambda shape: float(work(family, shape)))))
