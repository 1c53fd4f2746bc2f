"""The scheduler for buckets and exact rectangles, with its choice of prefills within the prefill budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.buckets.lookup import prefill_path
from llmc.buckets.plan import Plan
from llmc.runtime.engine.scheduling.base import Drafter, ScheduledBatch, ScheduledRow, Scheduler, SchedulerConfig
from llmc.runtime.engine.scheduling.queue import ScheduledSequence, Span
from llmc.runtime.engine.scheduling.slots import Prefix, SlotTable, longest_match

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket


@dataclass(frozen=True, slots=True)
class PromptStep:
    """Prompt spans that run together in `bucket` (None: exact); `tokens` counts computed tokens, including padding."""

    bucket: Bucket | None
    sequences: tuple[ScheduledSequence, ...]
    spans: tuple[Span, ...]
    tokens: int


class PromptSteps:
    """Chooses prefill steps of a plan; its only request state is the spans noted in them.

    While sequences decode, a prompt uses buckets of at most `prefill_budget` tokens. If those do not reach its end, it
    uses buckets up to the smallest size that does.
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
        """The first token to compute of a prompt of `length` with `cached` tokens in the cache.

        It is less than `cached` if no bucket can begin there.
        """
        if self._exact:
            return cached
        path = prefill_path(self._view(self._cap(length, decoding)), [length], [cached])
        return path[0].spans[0][0]

    def step(self, prompts: Sequence[ScheduledSequence], decoding: bool) -> PromptStep:
        """The next step of the first of `prompts`, shared with others if that costs less."""
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
        """Note that `span` of a prompt is cached."""
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
        """The largest bucket, in tokens, that a prompt of `length` may use."""
        if not decoding:
            return self._largest
        return self._caps[bisect_left(self._reaches, length)]

    def _view(self, cap: int) -> Plan:
        """The plan restricted to prompt buckets of at most `cap` tokens."""
        if cap >= self._largest:
            return self._plan
        view = self._views.get(cap)
        if view is None:
            buckets = (bucket for bucket in self._plan.prompt if bucket.tokens <= cap)
            view = Plan(self._plan.limits, (*buckets, self._plan.decode[0]), self._plan.provenance)
            self._views[cap] = view
        return view


def _caps(plan: Plan, budget: int) -> tuple[list[int], list[int]]:
    """Bucket sizes in tokens, ascending, and the longest prompt that buckets up to each size can run.

    The first size is `budget` if any bucket is that small. Sizes that reach no further than smaller ones are omitted.
    """
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


class BucketScheduler(Scheduler):
    """Alternates prefill and decode steps.

    `drafter` is used only if any shape runs and a single sequence decodes: rows of several tokens over a past run one
    at a time there, which costs more than a step of one token each. Raises InputError naming a field that is out of
    range or does not fit the plan, and ArtifactError for a plan with gaps, because decode steps run over the first
    slots and cannot be split.
    """

    _slots: SlotTable

    def __init__(self, plan: Plan, config: SchedulerConfig, drafter: Drafter | None = None) -> None:
        super().__init__(plan, config)
        self._plan = plan
        self._drafter = drafter if config.exact else None
        self._prefill = PromptSteps(plan, config)

    def _empty(self) -> None:
        super()._empty()
        self._arranged = True
        """Whether the decoding sequences are in slots 0, 1, …, in order."""
        self._leading: set[int] = set()
        """Groups of which a sequence is in prefill."""
        self._spent = 0
        """Prompt tokens since the last decode step, while some sequence could decode."""
        self._rows: tuple[Sequence[ScheduledSequence], PromptStep | None] = ((), None)
        """Of the running step."""

    def _new_slots(self) -> SlotTable:
        return SlotTable(self._config.slots, self._config.min_prefix)

    def add(
        self, sequence: int, prompt: Sequence[int], *, priority: int = 0, group: int | None = None,
        budget: int | None = None, handed: bool = False, adapter: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence. Later sequences of a group wait until its prompt is cached, and copy it.

        Every slot has room for max_model_len, whatever the budget.
        """
        length = len(prompt)
        alone = handed or self._config.rewind.states
        if alone or (group is not None and (length < 2 or not self._prefill.start(length, length - 1, False))):
            group = None  # it has no shareable prefix, so prefill its sequences together
        super().add(
            sequence, prompt, priority=priority, group=group, budget=budget, handed=handed, adapter=adapter
        )  # fmt: skip

    def next(self) -> ScheduledBatch | None:
        """The next step, or None if there is nothing to run."""
        self._require_complete()
        admitted = self._admit() if len(self._queue) else ()
        if admitted and (handed := tuple([s for s in self._prefilling if s.handed])):
            self._rows = handed, None
            return self._hand_over(handed, self._slots.take_copies(), admitted)
        step = self._prompt_step() if self._prefilling else None
        if step is not None:
            return self._prompt(step, admitted)
        return self._decode(admitted) if self._decoding else None

    def complete(self, work: ScheduledBatch, tokens: Mapping[int, Sequence[int]], finished: Set[int]) -> None:
        """Report a step's results."""
        self._completed(work)
        sequences, step = self._rows
        if work.handed:
            self._took_over(sequences, tokens, finished)
            self._arranged = False
            return
        if step is None:
            self._decoded(sequences, tokens, finished)
            return
        for sequence, span in zip(sequences, step.spans, strict=True):
            if sequence.gone:
                continue
            self._prefill.ran(sequence, span)
            if sequence.cached < sequence.prompt_length:
                self._prefilling.remove(sequence)
                self._prefilling.append(sequence)
                continue
            self._prefilled(sequence, tokens, finished)
            if not sequence.gone:
                self._arranged = False

    def _admit(self) -> tuple[tuple[int, int], ...]:
        """Move sequences from the queue to slots; returns their ids and the prompt tokens that a prefix saves."""
        admitted = []
        while len(self._prefilling) + len(self._decoding) < self._config.max_num_seqs:
            sequence = self._queue.pop(self._leading)
            if sequence is None:
                break
            self._arrange()
            self._slots.admit(sequence, None if sequence.handed else self._prefix(sequence))
            self._prefilling.append(sequence)
            if sequence.group is not None and not self._shared(sequence):
                self._leading.add(sequence.group)
            admitted.append((sequence.id, sequence.cached))
        return tuple(admitted)

    def _prefix(self, sequence: ScheduledSequence) -> Prefix | None:
        """The cached prefix of the prompt, cut to where a step can begin; None if it is not worth a copy."""
        shares = sequence.group is not None
        least = 1 if shares else self._config.min_prefix
        if not least or sequence.prompt_length <= least:
            return None
        match = longest_match(self._slots, sequence, within_group=not self._config.min_prefix)
        if match is None or match.length < least:
            return None
        slot, length, floor = match
        usable = min(length, self._prefill.start(sequence.prompt_length, length, bool(self._decoding)))
        if usable < max(least, floor):
            return None
        kept = self._slots.retained[slot]
        return Prefix(slot, usable, kept is not None and kept.length == length, floor)

    def _shared(self, sequence: ScheduledSequence) -> bool:
        """Whether the cache already held all reusable prompt tokens, so that others of its group need not wait."""
        length = sequence.prompt_length
        return sequence.cached >= self._prefill.start(length, length - 1, bool(self._decoding))

    def _prompt_step(self) -> PromptStep | None:
        """The prefill step to run now; None if it is the decoding sequences' turn."""
        prompts = self._prefilling
        ready = self._decoding
        if ready and not self._arranged:
            ready = self._slots.placeable(ready)
            if len(ready) < len(self._decoding):
                # every slot is live, and prompts in low slots block sequences in higher slots: run those prompts first
                prompts = sorted(prompts, key=lambda sequence: sequence.slot)
        if not ready:
            self._spent = 0
            return self._prefill.step(prompts, decoding=False)
        step = self._prefill.step(prompts, decoding=True)
        if self._spent and self._spent + step.tokens > self._config.prefill_budget:
            return None
        self._spent += step.tokens
        return step

    def _prompt(self, step: PromptStep, admitted: tuple[tuple[int, int], ...]) -> ScheduledBatch:
        rows = tuple(
            ScheduledRow(s.id, s.slot, start, s.tokens[start:stop], stop == s.prompt_length, 0, s.adapter)
            for s, (start, stop) in zip(step.sequences, step.spans, strict=True)
        )
        self._running = ScheduledBatch("prompt", step.bucket, rows, self._slots.take_copies(), admitted)
        self._written(rows)
        self._rows = step.sequences, step
        return self._running

    def _decode(self, admitted: tuple[tuple[int, int], ...]) -> ScheduledBatch:
        sequences = self._decoding if self._arranged else self._arrange()
        context = max([s.cached for s in sequences])
        if context > self._plan.limits.longest_past:
            raise RuntimeError(f"a sequence with {context} cached tokens was not finished at max_model_len")
        drafts = self._drafts(sequences)
        count = len(drafts)
        rows = tuple(
            [ScheduledRow(s.id, s.slot, s.cached, (s.tokens[-1], *drafts), True, count, s.adapter) for s in sequences]
        )
        bucket = None if self._config.exact else self._plan.lookup("decode", len(rows), 1, context)
        self._running = ScheduledBatch("decode", bucket, rows, self._slots.take_copies(), admitted)
        self._written(rows)
        self._spent = 0
        self._rows = tuple(sequences), None
        return self._running

    def _drafts(self, sequences: Sequence[ScheduledSequence]) -> Sequence[int]:
        if self._drafter is None or len(sequences) > 1:
            return ()
        return self._drafter(
            sequences[0].id, sequences[0].tokens, self._draftable(self._plan.limits.max_num_batched_tokens - 1)
        )

    def _arrange(self) -> list[ScheduledSequence]:
        """Move the decoding sequences to the first slots; returns those that can decode now, by slot."""
        if self._arranged:
            return self._decoding
        ready = self._slots.arrange(self._decoding)
        if len(ready) == len(self._decoding):
            self._decoding = ready
            self._arranged = True
        return ready

    def _leave_prefill(self, sequence: ScheduledSequence) -> None:
        super()._leave_prefill(sequence)
        if sequence.group is not None:
            self._leading.discard(sequence.group)
            self._queue.release(sequence.group)

    def _leave(self, sequence: ScheduledSequence) -> None:
        """A decoding sequence ended. If it was in the last slot, it leaves no hole."""
        last = self._arranged and self._decoding[-1] is sequence
        super()._leave(sequence)
        self._arranged = last or not self._decoding
