"""What traffic asks of a plan: how often each (batch, query, context) step happens, in bounded memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Phase
from llmc.buckets.candidates import Candidates
from llmc.buckets.optimise.demand import Demand
from llmc.buckets.traffic.events import DecodeRun, PromptGroup
from llmc.buckets.traffic.grouping import Grouping, Step

MAX_STEPS = 1 << 17
"""Distinct prompt steps that are told apart; beyond it lengths are rounded up, by less than 1 part in 256."""


@dataclass(frozen=True)
class Observed:
    """The steps of one phase in some traffic.

    `demands` maps the largest batch that prompts may share a step in to the steps that come of it (decode: one entry);
    points are rounded up to the candidates. `exact` maps the same to the tokens of these steps in buckets of just
    their size; `real` is the tokens that had to be computed (prompt) or read (decode), fewer where sequences of unequal
    length share a step.
    """

    demands: Mapping[int, Demand]
    exact: Mapping[int, float]
    real: Mapping[int, float]


class _PromptCount:
    """Steps by how often they happen, rounded up once there are too many to tell apart."""

    def __init__(self, grouping: Grouping, largest_query: int) -> None:
        self.grouping = grouping
        self.counts: Counter[Step] = Counter()
        self.exact = 0
        self._largest = largest_query
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


def caps(widest: int) -> list[int]:
    """The largest batches that are tried for sharing prompt steps: 1, 2, 4 … and `widest`."""
    return [*(1 << i for i in range(widest.bit_length()) if 1 << i < widest), widest]


def observe(
    events: Iterable[PromptGroup | DecodeRun], prompt: Candidates, decode: Candidates, groupings: Sequence[Grouping]
) -> dict[Phase, Observed]:
    """Count the steps of a schedule, prompts once for each of `groupings`, which ascend in their widest step."""
    counts = [_PromptCount(grouping, int(prompt.values[1][-1])) for grouping in groupings]
    contexts = decode.values[2].tolist()
    decode_counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    real: Counter[Phase] = Counter()
    decode_exact = 0
    for event in events:
        if isinstance(event, PromptGroup):
            size = len(event.lengths)
            real["prompt"] += sum(event.lengths) - sum(event.cached)
            steps: list[Step] = []
            before = 0
            for count in counts:
                if before < size:
                    steps = count.grouping.steps(event)
                    before = count.grouping.widest
                for step in steps:
                    count.add(step)
        else:
            batch, longest, total, left = event
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
    demands = {c.grouping.widest: _demand(prompt.up_to_batch(c.grouping.widest), c.counts.items()) for c in counts}
    widest = int(decode.values[0][-1])
    return {
        "prompt": Observed(
            demands, {c.grouping.widest: c.exact for c in counts}, dict.fromkeys(demands, real["prompt"])
        ),
        "decode": Observed({widest: _demand(decode, rows)}, {widest: decode_exact}, {widest: real["decode"]}),
    }


def _demand(candidates: Candidates, steps: Iterable[tuple[Step, int]]) -> Demand:
    """The steps rounded up to the candidates' values, merged."""
    counted = sorted(steps)
    points = np.array([step for step, _ in counted], np.int64).reshape(-1, 3)
    weights = np.array([number for _, number in counted], np.float64)
    rounded = np.stack([candidates.round_up(i, points[:, i]) for i in range(3)], axis=1)
    return Demand(rounded, weights)


def uniform(candidates: Candidates) -> Observed:
    """Every step that the candidates admit once: what is planned for when nothing is known about traffic.

    A point of the grid weighs as many (batch, query, context) as round up to it. For each cap on the batch of prompt
    steps, wider ones count as several of it and one of the rest.
    """
    widest = int(candidates.values[0][-1])
    allowed_caps = [cap for cap in caps(widest) if cap >= int(candidates.values[0][0])]
    lengths = [np.diff(values, prepend=-1 if column else 0) for column, values in enumerate(candidates.values[1:])]
    demands, real = {}, {}
    for cap in [widest] if candidates.phase == "decode" else allowed_caps:
        grid = candidates.up_to_batch(cap)
        sizes = np.arange(1, widest + 1)
        rows = np.bincount(np.concatenate([np.repeat(cap, (sizes // cap).sum()), sizes % cap]), minlength=cap + 1)
        places = np.searchsorted(grid.values[0], np.arange(1, cap + 1))
        steps = np.bincount(places, rows[1:], len(grid.values[0]))
        sequences = np.bincount(places, rows[1:] * np.arange(1, cap + 1), len(grid.values[0]))
        points = _product(grid.values).astype(np.int64)
        keep = grid.allowed(points)
        demands[cap] = Demand(points[keep], _product([steps, *lengths]).prod(axis=1)[keep])
        # sequences of each batch, times the tokens of each length summed over the lengths that round up to it
        column = 0 if candidates.phase == "prompt" else 1
        centres = [values - (gap - 1) / 2 for values, gap in zip(grid.values[1:], lengths, strict=True)]
        tokens = _product([sequences, *lengths]).prod(axis=1) * _product([steps, *centres])[:, column + 1]
        real[cap] = float(tokens[keep].sum())
    return Observed(demands, real, real)


def _product(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The grid [n, 3] of three columns of values."""
    return np.stack([axis.ravel() for axis in np.meshgrid(*columns, indexing="ij")], axis=1)
