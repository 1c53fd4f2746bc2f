"""What the plots and tables show, as plain data: plans, and what traffic does on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.evaluation import Evaluation, PhaseEvaluation
from llmc.buckets.plan import Plan
from llmc.buckets.plots.asked import Asked, Ints
from llmc.buckets.replay import replay
from llmc.buckets.text_table import percent

if TYPE_CHECKING:
    from llmc.buckets.traffic.source import Traffic

Value = TypeVar("Value")

MAX_BATCHES, MAX_LENGTHS = 128, 256
"""Values of a grid that are looked up and drawn; of more of them every second, third … is."""


LEAST_RAGGED = 0.0005
"""Ragged waste below this, which is written as 0.0%, is not mentioned."""


@dataclass(frozen=True)
class PlanView:
    """A plan, and with traffic what that does on it; `name` is what its user calls it, printable.

    `asked` has for each phase: context of the serving bucket → steps [batches, lengths], see `Asked.counts`;
    `batches` and `lengths` are the upper edges of those bins. `notes` are the plan's, then those on the traffic.
    """

    name: str
    plan: Plan
    evaluation: Evaluation | None
    asked: Mapping[Phase, Mapping[int, Ints]]
    batches: Ints
    lengths: Ints
    notes: tuple[str, ...]

    def buckets(self, phase: Phase) -> tuple[Bucket, ...]:
        """The plan's buckets of a phase, ascending."""
        return self.plan.prompt if phase == "prompt" else self.plan.decode

    def result(self, phase: Phase) -> PhaseEvaluation | None:
        """What traffic did on a phase; None without traffic."""
        if self.evaluation is None:
            return None
        return self.evaluation.prompt if phase == "prompt" else self.evaluation.decode

    def steps(self, phase: Phase, context: int) -> Ints:
        """The steps [batches, lengths] that buckets of that context serve (decode: 0 for all); 0 without traffic."""
        none = np.zeros((len(self.batches), len(self.lengths)), np.int64)
        return self.asked.get(phase, {}).get(context, none)


@dataclass(frozen=True)
class Cells:
    """Which bucket serves each (batch, length) after `context` cached tokens (decode: the length is the context).

    `served[i, j]` is the place, in plan order, of the bucket that lookup gives for `batches[i]` and `lengths[j]`, and
    so for all above the values before; -1 where there is none. `values` is how many batches and lengths the plan has
    here, of which `batches` and `lengths` may be a part.
    """

    batches: Ints
    lengths: Ints
    served: Ints
    values: tuple[int, int]


def gather(plans: Sequence[tuple[str, Plan]], traffic: Traffic | None) -> list[PlanView]:
    """The plans as they are drawn; each replays `traffic` once. Raises InputError as `Traffic` does."""
    return [_view(printable(name), plan, traffic) for name, plan in plans]


def _view(name: str, plan: Plan, traffic: Traffic | None) -> PlanView:
    asked = Asked(plan)
    notes = [str(note) for note in plan.provenance.notes]
    if traffic is None:
        return PlanView(name, plan, None, {}, asked.batches, asked.lengths, tuple(map(printable, notes)))
    evaluation = replay(plan, traffic, asked.passing)
    notes += [f"traffic: {note}" for note in traffic.notes()]
    counts = {phase: asked.counts(phase) for phase in PHASES}
    return PlanView(name, plan, evaluation, counts, asked.batches, asked.lengths, tuple(map(printable, notes)))


def cells(plan: Plan, phase: Phase, context: int) -> Cells:
    """The cells of a phase; for prompts of those buckets that attend to at least `context` cached tokens."""
    buckets = plan.prompt if phase == "prompt" else plan.decode
    known = [bucket for bucket in buckets if bucket.context >= context]
    batches = sorted({bucket.batch for bucket in known})
    lengths = sorted({length(bucket) for bucket in known})
    values = len(batches), len(lengths)
    batches, lengths = _part(batches, MAX_BATCHES), _part(lengths, MAX_LENGTHS)
    places = {bucket: place for place, bucket in enumerate(buckets)}
    served = np.full((len(batches), len(lengths)), -1, np.int64)
    for i, batch in enumerate(batches):
        for j, size in enumerate(lengths):
            query, cached = (size, context) if phase == "prompt" else (1, size)
            bucket = plan.lookup(phase, batch, query, cached)
            if bucket is not None:
                served[i, j] = places[bucket]
    return Cells(np.array(batches, np.int64), np.array(lengths, np.int64), served, values)


def length(bucket: Bucket) -> int:
    """What plots show along a bucket: its query in tokens, or the context of a decode bucket."""
    return bucket.query if bucket.phase == "prompt" else bucket.context


def _part(values: list[int], most: int) -> list[int]:
    every = -(-len(values) // most)
    return values[::-every][::-1]


def spread(values: Sequence[Value], most: int) -> list[Value]:
    """At most `most` ≥ 2 of `values`, evenly spread, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[place * (len(values) - 1) // (most - 1)] for place in range(most)]


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 bucket", "1,200 buckets"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def finding(view: PlanView, phase: Phase) -> str:
    """What a plot of a phase says, in one line. Ragged waste: see `evaluation`."""
    buckets = counted(len(view.buckets(phase)), "bucket")
    result = view.result(phase)
    if result is None:
        return f"{phase}: {buckets}"
    ragged = result.ragged_waste or 0.0
    of_it = f" ({percent(ragged)} ragged)" if ragged >= LEAST_RAGGED else ""
    text = f"{phase}: {percent(result.waste)} waste{of_it} over {counted(result.steps, 'step')}, {buckets}"
    if not result.steps:
        text = f"{phase}: {buckets}, the traffic takes no step"
    if not result.uncovered:
        return text
    return f"{text}, {counted(result.uncovered, 'request' if phase == 'prompt' else 'step')} uncovered"


def printable(text: str) -> str:
    """`text` with what cannot be shown replaced by "?"."""
    return "".join(character if character.isprintable() else "?" for character in text)


def shortened(text: str, most: int) -> str:
    """At most `most` characters of `text`, the middle left out."""
    if len(text) <= most:
        return text
    return f"{text[: most - most // 3 - 1]}…{text[len(text) - most // 3 :]}"
