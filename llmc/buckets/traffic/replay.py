"""Replaying traffic on a finished plan."""

from __future__ import annotations

from llmc.buckets.evaluation import Evaluation, evaluate
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.source import Traffic


def replay(plan: Plan, traffic: Traffic) -> Evaluation:
    """What `plan` does on `traffic`: the schedule of a server under the plan's limits, see `evaluation.evaluate`."""
    widest = plan.prompt[-1].batch
    events = traffic.events(plan.limits, widest)
    return evaluate(plan, events, bench=traffic.bench, decode_requests=lambda: traffic.decode_requests)
