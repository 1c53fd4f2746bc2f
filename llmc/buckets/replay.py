"""Replaying traffic on a finished plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
