"""Demand of traffic on a plan: counts of each (batch, query, context) step, in bounded memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Phase
from llmc.buckets.cost.work import STEP_WEIGHT, TOKEN_WEIGHT
from llmc.buckets.lookup import BucketSet, prefill_path
from llmc.buckets.optimise.demand import Demand
from llmc.buckets.planner.candidates import Candidates
from llmc.buckets.traffic.events import DecodeRun, PromptGroup

Step = tuple[int, int, int]
"""(batch, query, context)."""


class Grouping(Protocol):
    """Splits a group of prompts that are admitted together into steps of at most `widest` prompts.

    Where a rule has proposed buckets, the steps are those of `lookup.prefill_path`. Where any bucket of a grid may be
    chosen, the rule is the same (neighbours in length share a step where that costs less than separate steps) with the
    best-fitting point of the grid.
    """

    widest: int

    def steps(self, group: PromptGroup) -> list[Step]:
        """Return the unpadded steps."""
        ...


class PlanGrouping:
    """The steps that a finished plan's buckets would run."""

    def __init__(self, plan: BucketSet) -> None:
        self.widest = plan.prompt[-1].batch
        self._plan = plan

    def steps(self, group: PromptGroup) -> list[Step]:
        """Return the unpadded steps."""
        return [
            (len(step.rows), max(b - a for a, b in step.spans), max(a for a, _ in step.spans))
            for step in prefill_path(self._plan, group.lengths, group.cached)
        ]


class FreeGrouping:
    """The steps of least cost when every point of the candidates' grid is a bucket.

    A step costs batch · query · (TOKEN_WEIGHT + query + context) + STEP_WEIGHT, sizes rounded up to the grid's. Prompts
    longer than the largest query run in chunks of it. No chunk starts beyond the largest context, from which the
    largest query finishes any prompt; a longer cached prefix is recomputed from there.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.widest = int(candidates.values[0][-1])
        self._most_tokens = candidates.limits.max_num_batched_tokens
        self._candidates = candidates
        self._largest = int(candidates.values[1][-1])
        limits = candidates.limits
        self._last = int(candidates.values[2][-1]) if limits.contexts else limits.longest_prompt
        self._batches = candidates.round_up(0, np.arange(1, self.widest + 1))

    def steps(self, group: PromptGroup) -> list[Step]:
        """Return the unpadded steps."""
        found: list[Step] = []
        for turn in self._turns(group):
            if len(turn) == 1 or self.widest == 1:
                found += [(1, new, past) for new, past in turn]
            else:
                found += self._shared(turn)
        return found

    def _turns(self, group: PromptGroup) -> Iterator[list[tuple[int, int]]]:
        """(new tokens, tokens before) of every prompt's next chunk, turn by turn."""
        rows = list(zip(group.lengths, (min(past, self._last) for past in group.cached), strict=True))
        while rows:
            turn, rest = [], []
            for length, start in rows:
                stop = length
                if start + self._largest < length:
                    stop = min(start + self._largest, self._last)
                    rest.append((length, stop))
                turn.append((stop - start, start))
            yield turn
            rows = rest

    def _shared(self, turn: Sequence[tuple[int, int]]) -> list[Step]:
        ordered = sorted(turn)
        count = len(ordered)
        exact = np.array(ordered, np.int64)
        new = self._candidates.round_up(1, exact[:, 0])
        past = self._candidates.round_up(2, exact[:, 1] if self._candidates.limits.contexts else 0 * exact[:, 1])
        best = np.zeros(count + 1)
        begins = np.zeros(count + 1, np.int64)
        for end in range(1, count + 1):
            first = max(0, end - self.widest)
            context = np.maximum.accumulate(past[first:end][::-1])[::-1]
            tokens = self._batches[: end - first][::-1] * new[end - 1]
            total = best[first:end] + tokens * (TOKEN_WEIGHT + new[end - 1] + context) + STEP_WEIGHT
            total[:-1][tokens[:-1] > self._most_tokens] = np.inf
            begins[end] = first + int(np.argmin(total))
            best[end] = total[begins[end] - first]
        steps: list[Step] = []
        end = count
        while end:
            begin = int(begins[end])
            steps.append((end - begin, int(exact[end - 1, 0]), int(exact[begin:end, 1].max())))
            end = begin
        return steps


MAX_STEPS = 1 << 17
"""Most distinct prefills counted separately; beyond it lengths are rounded up, by less than 1 part in 256."""


@dataclass(frozen=True)
class Observed:
    """The steps of one phase in some traffic, when they are served from `candidates`; points are rounded up to them.

    `real` is the tokens that had to be computed (prompt) or read (decode). `exact` is the tokens of the steps in
    buckets of exactly their size: more where sequences of unequal length share a step, or cached tokens are recomputed.
    """

    candidates: Candidates
    demand: Demand
    exact: float
    real: float


class _PromptCount:
    """Counts of steps, rounded up once there are more than MAX_STEPS distinct ones."""

    def __init__(self, candidates: Candidates, grouping: Grouping) -> None:
        self.candidates = candidates
        self.grouping = grouping
        self.counts: Counter[Step] = Counter()
        self.exact = 0
        self._largest = int(candidates.values[1][-1])
        self._coarse = False

    def add(self, step: Step) -> None:
        self.exact += step[0] * step[1]
        self.counts[self._rounded(step) if self._coarse else step] += 1
        if not self._coarse and len(self.counts) > MAX_STEPS:
            self._coarse = True
            counts, self.counts = self.counts, Counter()
            for known, number in counts.items():
                self.counts[self._rounded(known)] += number

    def _rounded(self, step: Step) -> Step:
        batch, query, context = step
        unit = 1 << max(0, query.bit_length() - 9)
        return batch, min(-(-query // unit) * unit, self._largest), context


def ways(prompt: Candidates) -> list[Candidates]:
    """Return the subsets of the candidates to try for prompts, the narrowest first.

    First those no larger than the bucket that covers everything, which one graph can serve. Then all of at most 1, 2, 4
    … sequences: sharing steps saves some, but takes graphs of more batches.
    """
    covering = prompt.covers_all()
    widest = int(prompt.values[0][-1])
    caps = [*(1 << i for i in range(widest.bit_length()) if 1 << i < widest), widest]
    found = [] if covering is None else [prompt.within(*covering)]
    return found + [prompt.up_to_batch(cap) for cap in caps if cap >= int(prompt.values[0][0])]


def observe(
    events: Iterable[PromptGroup | DecodeRun], prompts: Sequence[tuple[Candidates, Grouping]], decode: Candidates
) -> dict[Phase, list[Observed]]:
    """Count the steps of a schedule: prompts once for each pair of candidates and grouping in `prompts`."""
    counts = [_PromptCount(candidates, grouping) for candidates, grouping in prompts]
    contexts = decode.values[2].tolist()
    decode_counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    real: Counter[Phase] = Counter()
    decode_exact = 0
    for event in events:
        if isinstance(event, PromptGroup):
            real["prompt"] += sum(event.lengths) - sum(event.cached)
            steps: list[Step] = []
            for index, count in enumerate(counts):
                # these candidates differ only in the batch: steps wider than the group change nothing
                if index <= 1 or counts[index - 1].grouping.widest < len(event.lengths):
                    steps = count.grouping.steps(event)
                for step in steps:
                    count.add(step)
        else:
            batch, longest, total, left = event
            if not decode.limits.contexts:
                real["decode"] += batch * left
                decode_exact += batch * left
                decode_counts[batch][0] += left
                continue
            growth = batch * (left * (left - 1) // 2)
            real["decode"] += total * left + growth
            decode_exact += batch * longest * left + growth
            row = decode_counts[batch]
            while left > 0:
                at = bisect_left(contexts, longest)
                here = min(left, contexts[at] - longest + 1)
                row[at] += here
                longest += here
                left -= here
    rows = [((batch, 1, contexts[at]), number) for batch, row in decode_counts.items() for at, number in row.items()]
    return {
        "prompt": [
            Observed(count.candidates, _demand(count.candidates, count.counts.items()), count.exact, real["prompt"])
            for count in counts
        ],
        "decode": [Observed(decode, _demand(decode, rows), decode_exact, real["decode"])],
    }


def _demand(candidates: Candidates, steps: Iterable[tuple[Step, int]]) -> Demand:
    counted = sorted(steps)
    read = candidates.limits.read
    points = np.array([(*sizes, read(context)) for (*sizes, context), _ in counted], np.int64).reshape(-1, 3)
    weights = np.array([number for _, number in counted], np.float64)
    rounded = np.stack([candidates.round_up(i, points[:, i]) for i in range(3)], axis=1)
    return Demand(rounded, weights)


def uniform(grid: Candidates, widest: int) -> Observed:
    """Return every step of up to `widest` sequences once: the demand when nothing is known about traffic.

    The weight of a grid point is the number of (batch, query, context) that round up to it. A batch above the grid's
    largest counts as several of it and one of the rest.
    """
    lengths = [np.diff(values, prepend=-1 if column else 0) for column, values in enumerate(grid.values[1:])]
    cap = int(grid.values[0][-1])
    sizes = np.arange(1, widest + 1)
    rows = np.bincount(np.concatenate([np.repeat(cap, (sizes // cap).sum()), sizes % cap]), minlength=cap + 1)
    indices = np.searchsorted(grid.values[0], np.arange(1, cap + 1))
    steps = np.bincount(indices, rows[1:], len(grid.values[0]))
    sequences = np.bincount(indices, rows[1:] * np.arange(1, cap + 1), len(grid.values[0]))
    points = _product(grid.values).astype(np.int64)
    keep = grid.allowed(points)
    # sequences of each batch, times the sum of the tokens of the lengths that round up to each length
    column = 2 if grid.phase == "decode" and grid.limits.contexts else 1
    centres = [values - (gap - 1) / 2 for values, gap in zip(grid.values[1:], lengths, strict=True)]
    tokens = _product([sequences, *lengths]).prod(axis=1) * _product([steps, *centres])[:, column]
    real = float(tokens[keep].sum())
    return Observed(grid, Demand(points[keep], _product([steps, *lengths]).prod(axis=1)[keep]), real, real)


def _product(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The grid [n, 3] of three columns of values."""
    return np.stack([axis.ravel() for axis in np.meshgrid(*columns, indexing="ij")], axis=1)
