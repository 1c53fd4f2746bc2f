"""Plain data for plots and tables of plans: the buckets, the traffic's steps, and its padding."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.evaluation.replay import Evaluation, PhaseEvaluation, replay
from llmc.buckets.lookup import prefill_path
from llmc.buckets.plan import Plan
from llmc.buckets.render.text import counted, percent, printable
from llmc.buckets.traffic.events import DecodeRun, PromptGroup
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.traffic.source import Traffic

Ints = NDArray[np.int64]

LENGTHS_PER_OCTAVE = 64
"""Lengths up to this many tokens are counted separately, longer ones to 1 part in as many."""

BATCHES_PER_OCTAVE = 16
"""The same for batch sizes, in sequences."""

PATHS_KEPT = 1 << 13
"""Groups of prompts whose steps are cached: the same lengths often repeat."""

Step = tuple[int, int, int]
"""Context of the bucket that serves the step, index of its batch, index of its query."""


def edges(most: int, per_octave: int) -> Ints:
    """Return ascending upper edges of bins for 1 to `most`: each number up to `per_octave`, then that many bins per
    octave.

    `per_octave` is a power of two, and the edges for a smaller one are among those for a larger one (except the last,
    which is at least `most`).
    """
    found = list(range(1, per_octave + 1))
    width = 1
    while found[-1] < most:
        found += [found[-1] + width * (i + 1) for i in range(per_octave)]
        width *= 2
    return np.array(found[: bisect_left(found, most) + 1], np.int64)


class Requested:
    """Counts of the steps in a stream of events.

    `batches` and `lengths` are the upper edges of the bins; lengths are queries of prefills and contexts of decode
    steps, in tokens.
    """

    def __init__(self, plan: Plan) -> None:
        self.batches = edges(plan.limits.max_num_seqs, BATCHES_PER_OCTAVE)
        self.lengths = edges(plan.limits.max_model_len, LENGTHS_PER_OCTAVE)
        self._plan = plan
        self._steps = lru_cache(PATHS_KEPT)(self._walk)
        self._prompt: Counter[Step] = Counter()
        # starts and ends of decode runs: their number, and the sum of their (context − 1)
        self._turns = np.zeros((2, len(self.batches), len(self.lengths) + 1), np.int64)
        self._decode_batches = self.batches.tolist()
        self._decode_lengths = self.lengths.tolist()

    def passing(self, events: Iterable[PromptGroup | DecodeRun]) -> Iterator[PromptGroup | DecodeRun]:
        """Pass the events on, and count them."""
        for event in events:
            if isinstance(event, PromptGroup):
                self._prompt.update(self._steps(event))
            else:
                self._add(event)
            yield event

    def counts(self, phase: Phase) -> dict[int, Ints]:
        """Return context of the serving bucket → steps [batches, lengths]; decode steps are all under 0."""
        if phase == "decode":
            number, total = np.cumsum(self._turns, axis=2)
            # each run that starts at a ≤ x has x + 1 − a steps at contexts up to x
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
        """The steps of a group, empty for a group that the plan does not serve; the evaluation counts those."""
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


Value = TypeVar("Value")

MAX_BATCHES, MAX_LENGTHS = 128, 256
"""Most values of a grid that are looked up and drawn; beyond it every second, third … value is."""

LEAST_RAGGED = 0.0005
"""Ragged padding below this is shown as 0.0% and not mentioned."""


@dataclass(frozen=True)
class PlanView:
    """A plan, and with traffic its results; `name` is the user's printable name for it.

    `requested` has for each phase: context of the serving bucket → steps [batches, lengths] (`Requested.counts`);
    `batches` and `lengths` are the upper edges of those bins. `notes` are the plan's, then those on the traffic.
    """

    name: str
    plan: Plan
    evaluation: Evaluation | None
    requested: Mapping[Phase, Mapping[int, Ints]]
    batches: Ints
    lengths: Ints
    notes: tuple[str, ...]

    def buckets(self, phase: Phase) -> tuple[Bucket, ...]:
        """Return the plan's buckets of a phase, ascending."""
        return self.plan.of(phase)

    def result(self, phase: Phase) -> PhaseEvaluation | None:
        """Return the results of a phase on traffic; None without traffic."""
        return None if self.evaluation is None else self.evaluation.of(phase)

    def steps(self, phase: Phase, context: int) -> Ints:
        """Return the steps [batches, lengths] that buckets of that context serve (decode: 0 for all); 0 without
        traffic.
        """
        none = np.zeros((len(self.batches), len(self.lengths)), np.int64)
        return self.requested.get(phase, {}).get(context, none)


@dataclass(frozen=True)
class Cells:
    """The bucket that serves each (batch, length) after `context` cached tokens (decode: the length is the context).

    `served[i, j]` is the index, in plan order, of the bucket that lookup gives for `batches[i]` and `lengths[j]`, and
    for all sizes above the previous values; -1 where there is none. `values` is the plan's number of batches and
    lengths here, of which `batches` and `lengths` may be a part.
    """

    batches: Ints
    lengths: Ints
    served: Ints
    values: tuple[int, int]


def gather(plans: Sequence[tuple[str, Plan]], traffic: Traffic | None) -> list[PlanView]:
    """Return views of the plans; each replays `traffic` once. Raises InputError like `Traffic`."""
    return [_view(printable(name), plan, traffic) for name, plan in plans]


def _view(name: str, plan: Plan, traffic: Traffic | None) -> PlanView:
    requested = Requested(plan)
    notes = [str(note) for note in plan.provenance.notes]
    if traffic is None:
        return PlanView(name, plan, None, {}, requested.batches, requested.lengths, tuple(map(printable, notes)))
    evaluation = replay(plan, traffic, requested.passing)
    notes += [f"traffic: {note}" for note in traffic.notes()]
    counts = {phase: requested.counts(phase) for phase in PHASES}
    return PlanView(name, plan, evaluation, counts, requested.batches, requested.lengths, tuple(map(printable, notes)))


def cells(plan: Plan, phase: Phase, context: int) -> Cells:
    """Return the cells of a phase; for prompts, of those buckets that attend to at least `context` cached tokens."""
    buckets = plan.of(phase)
    known = [bucket for bucket in buckets if bucket.context >= context]
    batches = sorted({bucket.batch for bucket in known})
    lengths = sorted({length(bucket) for bucket in known})
    values = len(batches), len(lengths)
    batches, lengths = _part(batches, MAX_BATCHES), _part(lengths, MAX_LENGTHS)
    indices = {bucket: index for index, bucket in enumerate(buckets)}
    served = np.full((len(batches), len(lengths)), -1, np.int64)
    for i, batch in enumerate(batches):
        for j, size in enumerate(lengths):
            query, cached = (size, context) if phase == "prompt" else (1, size)
            bucket = plan.lookup(phase, batch, query, cached)
            if bucket is not None:
                served[i, j] = indices[bucket]
    return Cells(np.array(batches, np.int64), np.array(lengths, np.int64), served, values)


def length(bucket: Bucket) -> int:
    """Return a bucket's length in plots: its query in tokens, or the context of a decode bucket."""
    return bucket.query if bucket.phase == "prompt" else bucket.context


def _part(values: list[int], most: int) -> list[int]:
    every = -(-len(values) // most)
    return values[::-every][::-1]


def spread(values: Sequence[Value], most: int) -> list[Value]:
    """Return at most `most` ≥ 2 of `values`, evenly spread, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[index * (len(values) - 1) // (most - 1)] for index in range(most)]


def finding(view: PlanView, phase: Phase) -> str:
    """Summarise a phase's plot in one line; `evaluation` defines ragged padding."""
    buckets = counted(len(view.buckets(phase)), "bucket")
    result = view.result(phase)
    if result is None:
        return f"{phase}: {buckets}"
    ragged = result.ragged_padding or 0.0
    of_it = f" ({percent(ragged)} ragged)" if ragged >= LEAST_RAGGED else ""
    text = f"{phase}: {percent(result.padding)} padding{of_it} over {counted(result.steps, 'step')}, {buckets}"
    if not result.steps:
        text = f"{phase}: {buckets}, the traffic takes no step"
    if not result.uncovered:
        return text
    return f"{text}, {counted(result.uncovered, 'request' if phase == 'prompt' else 'step')} uncovered"
