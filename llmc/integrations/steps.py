"""Steps and families that several servers share: prompts one at a time, apart from decodes; decodes by their number."""

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
    """`steps` decode steps in a row whose longest context is at most `context`, from step `start` of their run on."""

    context: int
    start: int
    steps: int

    def total(self, first: int, growth: int) -> int:
        """What is summed over the steps of a number that is `first` at the run's first step and grows at each."""
        return (first + growth * self.start) * self.steps + growth * self.steps * (self.steps - 1) // 2


def pieces(longest: int, steps: int, most: int, block: int = 1) -> Iterator[Piece]:
    """The decode steps of a run by their longest context, which is `longest` at the first and grows by one a step.

    Contexts are rounded up to multiples of `block`, at most `most`: for look-ups among such numbers nothing changes.
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
    """The steps for `requests`, which keep to `limits` and come in order of arrival; a number is one that computes so
    many tokens of one prompt.

    As schedule.py has them with one prompt a group, which goes before decodes; what of a prompt is not cached runs in
    parts of max_num_batched_tokens. Raises as `schedule`.
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
    """One graph for each number of requests that decode together, whatever their contexts; more run eagerly."""

    families: ClassVar[tuple[GraphFamily, ...]] = (GraphFamily(DECODE, ("requests",), "requests"),)
    miss: ClassVar[Miss] = "eager"

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """The batches of decode buckets."""
        return {DECODE: line.shapes(bucket.batch for bucket in plan.decode)}
