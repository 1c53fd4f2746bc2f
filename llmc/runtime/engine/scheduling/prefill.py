"""The choice of the next prompt steps, within the prompt tokens that may run between two decode steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.buckets.lookup import prefill_path
from llmc.buckets.plan import Plan
from llmc.runtime.engine.scheduling.sequence import ScheduledSequence, Span

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.engine.scheduling.base import SchedulerConfig


@dataclass(frozen=True, slots=True)
class PromptStep:
    """Spans of prompts that run together in `bucket` (None: exact); `tokens` are computed, padding included."""

    bucket: Bucket | None
    sequences: tuple[ScheduledSequence, ...]
    spans: tuple[Span, ...]
    tokens: int


class Prefill:
    """Prompt steps of a plan; keeps no state of requests but the spans noted in them.

    While sequences decode, a prompt runs along the buckets of at most `prefill_budget` tokens. Where those do not
    reach its end, it runs along the buckets up to the smallest size that do.
    """

    def __init__(self, plan: Plan, config: SchedulerConfig) -> None:
        self._plan = plan
        self._exact = config.exact
        self._budget = config.prefill_budget
        limit = plan.limits.max_num_batched_tokens
        self._chunk = min(limit, config.prompt_chunk or limit)
        self._largest = max(bucket.tokens for bucket in plan.prompt)
        self._widest = plan.prompt[-1].batch
        self._caps, self._reaches = _caps(plan, config.prefill_budget)
        self._views: dict[int, Plan] = {}
        if not self._exact:
            self._view(self._caps[0]).lookup("prompt", 1, 1, 0)

    def start(self, length: int, cached: int, decoding: bool) -> int:
        """The first token that has to be computed of a prompt of `length`, of which `cached` are in the cache.

        Less than `cached` where no bucket can begin there.
        """
        if self._exact:
            return cached
        path = prefill_path(self._view(self._cap(length, decoding)), [length], [cached])
        return path[0].spans[0][0]

    def step(self, prompts: Sequence[ScheduledSequence], decoding: bool) -> PromptStep:
        """The next step of the first of `prompts`, shared with others of them where that costs less."""
        first = prompts[0]
        if self._exact:
            chunk = min(self._chunk, self._budget) if decoding else self._chunk
            span = (first.cached, min(first.cached + chunk, first.prompt_length))
            return PromptStep(None, (first,), (span,), span[1] - span[0])
        cap = self._cap(first.prompt_length, decoding)
        companions = [s for s in prompts[1:] if self._cap(s.prompt_length, decoding) == cap]
        chosen = [first, *companions[: self._widest - 1]]
        spans = [self._span(sequence, cap) for sequence in chosen]
        # each prompt is treated as if it ended with its span, so that one step gets there and prompts share steps
        path = prefill_path(self._view(cap), [stop for _, stop in spans], [start for start, _ in spans])
        step = path[0]  # the step of prompts[0]: steps are ordered by their first row
        return PromptStep(step.bucket, tuple(chosen[row] for row in step.rows), step.spans, step.bucket.tokens)

    def ran(self, sequence: ScheduledSequence, span: Span) -> None:
        """Note that `span` of a prompt is in the cache."""
        sequence.cached = span[1]
        if sequence.spans:
            sequence.spans.pop()

    def _span(self, sequence: ScheduledSequence, cap: int) -> Span:
        if not sequence.spans or sequence.cap != cap:
            path = prefill_path(self._view(cap), [sequence.prompt_length], [sequence.cached])
            sequence.spans = [step.spans[0] for step in reversed(path)]
            sequence.cap = cap
        return sequence.spans[-1]

    def _cap(self, length: int, decoding: bool) -> int:
        """The most tokens of a bucket that a prompt of `length` may use."""
        if not decoding:
            return self._largest
        return self._caps[bisect_left(self._reaches, length)]

    def _view(self, cap: int) -> Plan:
        """The plan with only those prompt buckets that have at most `cap` tokens."""
        if cap >= self._largest:
            return self._plan
        view = self._views.get(cap)
        if view is None:
            buckets = (bucket for bucket in self._plan.prompt if bucket.tokens <= cap)
            view = Plan(self._plan.limits, (*buckets, self._plan.decode[0]), self._plan.provenance)
            self._views[cap] = view
        return view


def _caps(plan: Plan, budget: int) -> tuple[list[int], list[int]]:
    """Bucket sizes in tokens, ascending, the first of them `budget` if any bucket is that small, and the longest prompt
    that buckets up to each size can run, as coverage proves. Only sizes that reach
    further than smaller ones."""
    reach: dict[int, int] = {}
    for bucket in plan.prompt:
        cap = max(bucket.tokens, budget)
        reach[cap] = max(reach.get(cap, 0), plan.limits.reach(bucket))
    caps: list[int] = []
    reaches: list[int] = []
    for cap in sorted(reach):
        if not reaches or reach[cap] > reaches[-1]:
            caps.append(cap)
            reaches.append(reach[cap])
    return caps, reaches
