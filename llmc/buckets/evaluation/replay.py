"""Padding of a plan on traffic: each step of a schedule is looked up as at runtime, and its padding is counted.

Padding is (padded − real) / real, in tokens:

    prefill       padded = batch · query of its bucket      real = new tokens of the live rows
    decode step   padded = batch · context of its bucket    real = tokens in the cache of the live rows

Recomputed prompt tokens, where no bucket continues at the end of the cache, count as padding. A phase's padding is that
of its token sums, so large steps weigh more; the percentiles are over steps.

No plan can avoid the ragged padding: sequences of unequal length that share a step are padded to the longest of them,
even in a bucket of exactly that size. The buckets add the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.cost.bench import Bench
from llmc.buckets.evaluation.usage import BucketUsage, DecodeUsage, PromptUsage
from llmc.buckets.lookup import BucketSet
from llmc.buckets.render.page import Cells, Table, columns, counts
from llmc.buckets.render.text import percent
from llmc.buckets.traffic.events import DecodeRun, PromptGroup

if TYPE_CHECKING:
    from llmc.buckets.traffic.source import Traffic

RESULT = ("phase", "graphs", "requests", "steps", "padding", "ragged", "p50", "p95", "p99", "unused", "uncovered")
"""Columns of `PhaseEvaluation.cells`."""

RAGGED = "ragged: the part of the padding by sequences of unequal length that share a step, whatever the buckets."

USE = ("batch", "query", "context", "steps", "rows", "real tokens", "padded tokens", "padding", "share")
"""Columns of `BucketUse.cells`."""

SHOWN = 10
"""Buckets of a phase that a notebook shows, those with the most padded tokens."""


_NUMBERS = (
    "requests", "uncovered", "steps", "real_tokens", "padded_tokens", "padding", "ragged_padding", "padding_p50",
    "padding_p95", "padding_p99",
)  # fmt: skip
"""JSON fields of a phase, without its buckets."""


@dataclass(frozen=True)
class BucketUse:
    """Usage of one bucket.

    `requests` are live rows: a prompt counts in every step that computes a part of it, a decoding sequence in every
    step. `share` is the bucket's share of the padded tokens of its phase, 0 to 1.
    """

    bucket: Bucket
    steps: int
    requests: int
    real_tokens: int
    padded_tokens: int
    share: float

    @property
    def padding(self) -> float | None:
        """(padded − real) / real; None for an unused bucket."""
        return _padding(self.real_tokens, self.padded_tokens)

    def to_dict(self) -> dict[str, object]:
        """Return the usage as a JSON object."""
        own = ("steps", "requests", "real_tokens", "padded_tokens", "padding", "share")
        shape = {name: getattr(self.bucket, name) for name in ("batch", "query", "context")}
        return shape | {name: getattr(self, name) for name in own}

    def cells(self) -> Cells:
        """Return the usage as a table row under USE."""
        numbers = counts(*self.bucket.shape, self.steps, self.requests, self.real_tokens, self.padded_tokens)
        return (*numbers, percent(self.padding), percent(self.share))


@dataclass(frozen=True)
class PhaseEvaluation:
    """Results of one phase of a plan on traffic.

    requests      prompt: prompts that arrived; decode: sequences that take a decode step (`evaluate`)
    uncovered     prompt: requests, decode: steps that no bucket serves; the fields below exclude them
    exact_tokens  tokens if each step ran in a bucket of exactly its size
    padding_pNN     the least padding that NN% of the steps do not exceed, within 0.05 percentage points up to 1000%
                  and within 0.05% of itself beyond; None without steps
    seconds       measured or interpolated seconds of all steps; None without a bench that has the phase
    buckets       all of the phase, in plan order
    """

    phase: Phase
    requests: int
    uncovered: int
    steps: int
    real_tokens: int
    exact_tokens: int
    padded_tokens: int
    padding_p50: float | None
    padding_p95: float | None
    padding_p99: float | None
    seconds: float | None
    buckets: tuple[BucketUse, ...]

    @property
    def padding(self) -> float | None:
        """(padded − real) / real of all tokens; 0.118 means 11.8%, None without real tokens."""
        return _padding(self.real_tokens, self.padded_tokens)

    @property
    def ragged_padding(self) -> float | None:
        """The part of `padding` that remains with buckets of exactly each step's size; None without real tokens."""
        return _padding(self.real_tokens, self.exact_tokens)

    @property
    def unused(self) -> tuple[Bucket, ...]:
        """The unused buckets, in plan order."""
        return tuple(use.bucket for use in self.buckets if not use.steps)

    def hottest(self, count: int) -> tuple[BucketUse, ...]:
        """Return at most `count` used buckets, most padded tokens first; ties in plan order."""
        used = [use for use in self.buckets if use.steps]
        return tuple(sorted(used, key=lambda use: -use.padded_tokens)[:count])

    def to_dict(self) -> dict[str, object]:
        """Return the phase's evaluation as a JSON object; "seconds" only where known."""
        fields: dict[str, object] = {name: getattr(self, name) for name in _NUMBERS}
        fields["unused"] = [list(bucket.shape) for bucket in self.unused]
        fields["buckets"] = [use.to_dict() for use in self.buckets]
        return fields if self.seconds is None else fields | {"seconds": self.seconds}

    def cells(self) -> Cells:
        """Return the phase as a table row under RESULT."""
        all_padding = (self.padding, self.ragged_padding, self.padding_p50, self.padding_p95, self.padding_p99)
        return (
            self.phase, *counts(len(self.buckets), self.requests, self.steps), *map(percent, all_padding),
            *counts(len(self.unused), self.uncovered),
        )  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """Results of a plan on traffic, by phase."""

    prompt: PhaseEvaluation
    decode: PhaseEvaluation

    @property
    def phases(self) -> tuple[PhaseEvaluation, PhaseEvaluation]:
        """Both phases."""
        return self.prompt, self.decode

    def of(self, phase: Phase) -> PhaseEvaluation:
        """Return one phase."""
        return self.prompt if phase == "prompt" else self.decode

    def to_dict(self) -> dict[str, object]:
        """Return the evaluation as a JSON object."""
        return {"prompt": self.prompt.to_dict(), "decode": self.decode.to_dict()}

    def _repr_html_(self) -> str:
        from llmc.buckets.render.page import fragment

        tables = [Table("By phase", columns(RESULT, 1), [phase.cells() for phase in self.phases], RAGGED)]
        for phase in self.phases:
            if used := phase.hottest(SHOWN):
                heading = f"{phase.phase.capitalize()} buckets that pad most"
                tables.append(Table(heading, columns(USE, 0), [use.cells() for use in used]))
        padding = ", ".join(f"{phase.phase} {percent(phase.padding)}" for phase in self.phases)
        return fragment(f"Padding on the traffic: {padding}", (), tables)


def evaluate(
    plan: BucketSet,
    events: Iterable[PromptGroup | DecodeRun],
    *,
    bench: Bench | None = None,
    decode_requests: Callable[[], int] | None = None,
) -> Evaluation:
    """Evaluate `plan` on `events`, a stream of any length, in one pass and bounded memory.

    Prompts take the steps of `prefill_path`. Where it refuses a group, the prompts that it refuses individually are
    uncovered, and the rest run without them. A decode step takes `plan.lookup`.

    `decode_requests` is called after the last event and returns the number of requests that take a decode step: those
    that generate more than one token. Events do not show this number. Without it, all requests are counted, an upper
    bound. `bench` gives the seconds of the steps.
    """
    prompt, decode = PromptUsage(plan), DecodeUsage(plan)
    for event in events:
        if isinstance(event, DecodeRun):
            decode.add(event)
        else:
            prompt.add(event)
    prompt.flush()
    decode.flush()
    starting = prompt.requests if decode_requests is None else decode_requests()
    return Evaluation(_phase("prompt", prompt, prompt.requests, bench), _phase("decode", decode, starting, bench))


def _phase(phase: Phase, usage: BucketUsage, requests: int, bench: Bench | None) -> PhaseEvaluation:
    padded = usage.steps * usage.padded
    total = int(padded.sum())
    counts = zip(usage.steps.tolist(), usage.rows.tolist(), usage.real.tolist(), padded.tolist(), strict=True)
    uses = tuple(
        BucketUse(bucket, *numbers, numbers[-1] / total if total else 0.0)
        for bucket, numbers in zip(usage.buckets, counts, strict=True)
    )
    p50, p95, p99 = (usage.histogram.percentile(percent) for percent in (50, 95, 99))
    return PhaseEvaluation(
        phase, requests, usage.uncovered, int(usage.steps.sum()), int(usage.real.sum()), usage.exact, total, p50, p95,
        p99, _seconds(phase, usage, bench), uses,
    )  # fmt: skip


def _seconds(phase: Phase, usage: BucketUsage, bench: Bench | None) -> float | None:
    if bench is None or not bench.measured(phase):
        return None
    shapes = np.array([bucket.shape for bucket in usage.buckets], np.int64)
    return float(np.sum(bench.seconds(phase, *shapes.T) * usage.steps))


def _padding(real: int, padded: int) -> float | None:
    return (padded - real) / real if real else None


Watch = Callable[[Iterator[PromptGroup | DecodeRun]], Iterator[PromptGroup | DecodeRun]]


def replay(plan: BucketSet, traffic: Traffic, watch: Watch = iter) -> Evaluation:
    """Evaluate `plan` on `traffic` scheduled under the plan's limits, with `evaluate`.

    `watch` passes the events on, and may inspect them.
    """
    events = watch(traffic.events(plan.limits, plan.prompt[-1].batch))
    return evaluate(plan, events, bench=traffic.bench, decode_requests=lambda: traffic.decode_requests)


def uses_of(plan: BucketSet, traffic: Traffic) -> dict[Bucket, int]:
    """Return the number of steps of `traffic` that each bucket of `plan` runs.

    Raises InputError where the plan admits no request.
    """
    found = replay(plan, traffic)
    return {use.bucket: use.steps for phase in found.phases for use in phase.buckets}


def padding_ranges(plan: BucketSet, found: Evaluation, others: Sequence[Traffic]) -> dict[str, tuple[float, float]]:
    """Return the least and most padding by phase, of `found` and of `others`, traffic drawn at the ends of intervals.

    Empty without `others`.
    """
    if not others:
        return {}
    evaluations = [found, *(replay(plan, other) for other in others)]
    ranges: dict[str, tuple[float, float]] = {}
    for phase in PHASES:
        all_padding = [padding for one in evaluations if (padding := one.of(phase).padding) is not None]
        if all_padding:
            ranges[phase] = (min(all_padding), max(all_padding))
    return ranges
