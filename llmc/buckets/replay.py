"""Replaying traffic on a finished plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from llmc.buckets.bucket import PHASES, Bucket
from llmc.buckets.evaluation import Evaluation, evaluate
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.events import DecodeRun, PromptGroup
from llmc.buckets.traffic.source import Traffic

Watch = Callable[[Iterator[PromptGroup | DecodeRun]], Iterator[PromptGroup | DecodeRun]]


def replay(plan: Plan, traffic: Traffic, watch: Watch = iter) -> Evaluation:
    """What `plan` does on `traffic`: the schedule of a server under the plan's limits, see `evaluation.evaluate`.

    `watch` passes the events on, and may look at them.
    """
    events = watch(traffic.events(plan.limits, plan.prompt[-1].batch))
    return evaluate(plan, events, bench=traffic.bench, decode_requests=lambda: traffic.decode_requests)


def uses_of(plan: Plan, traffic: Traffic) -> dict[Bucket, int]:
    """How many steps of `traffic` each bucket of `plan` runs. Raises InputError where the plan admits no request."""
    found = replay(plan, traffic)
    return {use.bucket: use.steps for phase in (found.prompt, found.decode) for use in phase.buckets}


def waste_ranges(plan: Plan, found: Evaluation, others: Sequence[Traffic]) -> dict[str, tuple[float, float]]:
    """By phase the least and the most waste: of `found`, and of the same traffic drawn at `others`' ends of intervals.

    Empty without `others`.
    """
    if not others:
        return {}
    evaluations = [found, *(replay(plan, other) for other in others)]
    ranges: dict[str, tuple[float, float]] = {}
    for phase in PHASES:
        of = (one.prompt if phase == "prompt" else one.decode for one in evaluations)
        wastes = [one.waste for one in of if one.waste is not None]
        if wastes:
            ranges[phase] = (min(wastes), max(wastes))
    return ranges
