"""Steps and families shared by several servers: separate prefills of one prompt, and decodes by batch size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.events import DecodeRun, PromptGroup, TrafficRequest
from llmc.buckets.traffic.schedule import schedule
from llmc.buckets.traffic.step_time import StepTime
from llmc.integrations import line
from llmc.integrations.base import BucketRules, GraphFamily, Lists, Miss, Setup


class Piece(NamedTuple):
    """`steps` consecutive decode steps with contexts of at most `context`, from step `start` of their run on."""

    context: int
    start: int
    steps: int

    def total(self, first: int, growth: int) -> int:
        """Return the sum over the steps of a number that is `first` at the run's first step and grows by `growth`."""
        return (first + growth * self.start) * self.steps + growth * self.steps * (self.steps - 1) // 2


def pieces(longest: int, steps: int, most: int, block: int = 1) -> Iterator[Piece]:
    """Yield the decode steps of a run by their longest context, which starts at `longest` and grows by one per step.

    Contexts are rounded up to multiples of `block`, at most `most`, which does not affect look-ups among such numbers.
    """
    start = 0
    while start < steps:
        context = min(-(-(longest + start) // block) * block, most)
        count = steps - start if context == most else min(steps - start, context - longest - start + 1)
        yield Piece(context, start, count)
        start += count


def separate_steps(
    requests: Iterable[TrafficRequest], limits: Limits, step_time: StepTime
) -> Iterator[int | DecodeRun]:
    """Yield the steps for `requests`, which are within `limits` and in arrival order.

    An int is a step with that many tokens of one prompt. The steps follow schedule.py with one prompt per group, before
    decodes. The uncached part of a prompt runs in parts of max_num_batched_tokens. Raises like `schedule`.
    """
    most = limits.max_num_batched_tokens
    for event in schedule(requests, limits, step_time=step_time, prompt_batch=1):
        if isinstance(event, PromptGroup):
            for length, cached in zip(event.lengths, event.cached, strict=True):
                for past in range(cached, length, most):
                    yield min(most, length - past)
        else:
            yield event


DECODE = "decode"


class DecodeBatches(BucketRules):
    """One graph for each number of requests that decode together, regardless of their contexts; more run eagerly."""

    families: ClassVar[tuple[GraphFamily, ...]] = (GraphFamily(DECODE, ("requests",), "requests"),)
    miss: ClassVar[Miss] = "eager"

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Return the batches of decode buckets."""
        return {DECODE: line.shapes(bucket.batch for bucket in plan.decode)}
