"""Lists of decode steps counted in requests: what servers that have one share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.servers import line
from llmc.buckets.servers.base import Demand, Family, Finder, Lists, Setup, Shape
from llmc.buckets.traffic.chunked_schedule import chunked_steps
from llmc.buckets.traffic.events import DecodeRun, TrafficRequest
from llmc.buckets.traffic.schedule import schedule
from llmc.buckets.traffic.step_time import StepTime

DECODE = "decode"


class DecodeBatches:
    """One graph for each number of requests that decode together, and no other list."""

    families: ClassVar[tuple[Family, ...]] = (Family(DECODE, ("requests",), "requests"),)

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        """The next number of requests above; more run eagerly."""
        return line.NextAbove(shapes, "eager")

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        """The requests of the step."""
        return shape[0]

    def graphs(self, setup: Setup, lists: Lists) -> int:
        """One for each number of requests."""
        return len(lists[DECODE])

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """The batches of decode buckets, whatever their contexts."""
        return {DECODE: line.shapes(bucket.batch for bucket in plan.decode)}


def prefill_first(
    requests: Iterable[TrafficRequest], limits: Limits, step_time: StepTime, *, prompt_batch: int | None = None
) -> Iterator[Demand]:
    """Decode steps of a server that runs waiting prompts, in steps of their own, before any further decode step."""
    for event in schedule(requests, limits, step_time=step_time, prompt_batch=prompt_batch):
        if isinstance(event, DecodeRun):
            yield Demand(DECODE, (event.batch,), event.steps, event.batch * event.steps)


def decode_only(
    requests: Iterable[TrafficRequest], limits: Limits, step_time: StepTime, *, whole: bool
) -> Iterator[Demand]:
    """Steps with no prompt in them, of a server whose prompts and decodes share steps (traffic/chunked.py)."""
    for steps in chunked_steps(requests, limits, step_time, whole=whole):
        if not steps.chunks:
            batch = len(steps.cached)
            yield Demand(DECODE, (batch,), steps.steps, batch * steps.steps)
