"""The steps that traffic asks of a plan, counted by size in bounded memory: what plots show behind the buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Phase
from llmc.buckets.lookup import prefill_path
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.events import DecodeRun, PromptGroup
from llmc.errors import InputError

Ints = NDArray[np.int64]

LENGTHS_PER_OCTAVE = 64
"""Lengths up to this many tokens are told apart, longer ones to 1 part in as many."""

BATCHES_PER_OCTAVE = 16
"""The same for batch sizes, in sequences."""

PATHS_KEPT = 1 << 13
"""Groups of prompts whose steps are remembered: the same lengths come again and again."""

Step = tuple[int, int, int]
"""Context of the bucket that serves it, place of its batch, place of its query."""


def edges(most: int, per_octave: int) -> Ints:
    """Ascending upper edges of bins that hold 1 to `most`: each number to `per_octave`, then so many bins an octave.

    `per_octave` is a power of two, and the edges for a smaller one are among those for a larger one (but the last,
    which is at least `most`).
    """
    found = list(range(1, per_octave + 1))
    width = 1
    while found[-1] < most:
        found += [found[-1] + width * (i + 1) for i in range(per_octave)]
        width *= 2
    return np.array(found[: bisect_left(found, most) + 1], np.int64)


class Asked:
    """Counts of the steps in a stream of events.

    `batches` and `lengths` are the upper edges of the bins; lengths are queries of prompt steps and contexts of decode
    steps, in tokens.
    """

    def __init__(self, plan: Plan) -> None:
        self.batches = edges(plan.limits.max_num_seqs, BATCHES_PER_OCTAVE)
        self.lengths = edges(plan.limits.max_model_len, LENGTHS_PER_OCTAVE)
        self._plan = plan
        self._steps = lru_cache(PATHS_KEPT)(self._walk)
        self._prompt: Counter[Step] = Counter()
        # starts and ends of decode runs: how many, and the sum of their (context − 1)
        self._turns = np.zeros((2, len(self.batches), len(self.lengths) + 1), np.int64)
        self._decode_batches = self.batches.tolist()
        self._decode_lengths = self.lengths.tolist()

    def passing(self, events: Iterable[PromptGroup | DecodeRun]) -> Iterator[PromptGroup | DecodeRun]:
        """The same events, counted as they pass."""
        for event in events:
            if isinstance(event, PromptGroup):
                self._prompt.update(self._steps(event))
            else:
                self._add(event)
            yield event

    def counts(self, phase: Phase) -> dict[int, Ints]:
        """Context of the serving bucket → steps [batches, lengths]; decode steps are all under 0."""
        if phase == "decode":
            number, total = np.cumsum(self._turns, axis=2)
            # of the runs that start at a ≤ x, the steps at contexts up to x are x + 1 − a each
            below = number[:, :-1] * self.lengths - total[:, :-1]
            return {0: np.diff(below, prepend=0, axis=1)}
        shape = (len(self.batches), len(self.lengths))
        found: defaultdict[int, Ints] = defaultdict(lambda: np.zeros(shape, np.int64))
        for (context, row, column), number in sorted(self._prompt.items()):
            found[context][row, column] += number
        return dict(found)

    def _add(self, run: DecodeRun) -> None:
        row = bisect_left(self._decode_batches, run.batch)
        if row == len(self._decode_batches):
            return
        for sign, context in ((1, run.longest), (-1, run.longest + run.steps)):
            column = bisect_left(self._decode_lengths, context)
            self._turns[0, row, column] += sign
            self._turns[1, row, column] += sign * (context - 1)

    def _walk(self, group: PromptGroup) -> tuple[Step, ...]:
        """The steps of a group that the plan serves; of another one, which the evaluation counts, none."""
        try:
            path = prefill_path(self._plan, group.lengths, group.cached)
        except InputError:
            return ()
        return tuple(
            (
                step.bucket.context,
                bisect_left(self._decode_batches, len(step.rows)),
                bisect_left(self._decode_lengths, max(stop - start for start, stop in step.spans)),
            )
            for step in path
        )
