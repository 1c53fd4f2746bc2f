"""Generate for groups of prompts: prefill along the plan, decode, keep live sequences in the first slots.

A request's life: admitted to a slot → prefilled in one or more steps → one decode step a token, its batch shrinking as
others finish → finished. Each step is padded to the least-cost bucket, or runs at its exact shape where the executor
can.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llmc.buckets.bucket import Bucket
from llmc.buckets.lookup import prefill_path
from llmc.buckets.plan import Plan
from llmc.errors import ArtifactError, InputError
from llmc.runtime.executors.base import Executor
from llmc.runtime.sampling import SamplingParams, SequenceSampler, sample
from llmc.runtime.step import Step, exact, pad

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step ran as: the bucket, how full it was, the executable, and seconds for each part of the work.

    `requests` are the indices of the requests in its live rows.
    """

    phase: str
    batch: int
    query: int
    context: int
    live_rows: int
    padding_tokens: int
    executable: str
    prepare_s: float
    execute_s: float
    sample_s: float
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and how to continue it."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    end_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Token `token_id` of request `index`; `finish_reason` is set on the last one."""

    index: int
    token_id: int
    finish_reason: FinishReason | None
    step: int
    """Index into `Engine.records`."""


@dataclass
class _Sequence:
    index: int
    request: Request
    sampler: SequenceSampler
    budget: int
    cached: int = 0
    last_token: int = -1
    produced: int = 0
    cancelled: bool = False
    end_ids: frozenset[int] = field(default_factory=frozenset)


class Engine:
    """Runs requests in static batches over one executor. Not thread-safe."""

    def __init__(self, plan: Plan, executor: Executor, vocab_size: int, keep_records: bool = False) -> None:
        self.plan = plan
        self.executor = executor
        self.vocab_size = vocab_size
        self.records: list[StepRecord] = []
        self.keep_records = keep_records
        self.steps = 0
        self._running: dict[int, _Sequence] = {}

    def check(self, request: Request) -> None:
        """Raise InputError when the request cannot be run, naming the limit."""
        length, limits = len(request.prompt_token_ids), self.plan.limits
        if not length:
            raise InputError("the prompt is empty: it has no token")
        if length > limits.longest_prompt:
            raise InputError(
                f"the prompt has {length} tokens; this bundle takes at most {limits.longest_prompt} "
                + (
                    f"(max_prompt_len {limits.max_prompt_len})"
                    if limits.max_prompt_len is not None
                    else f"(max_model_len {limits.max_model_len}, one token left to generate)"
                )
            )
        smallest, largest = min(request.prompt_token_ids), max(request.prompt_token_ids)
        if smallest < 0 or largest >= self.vocab_size:
            found = smallest if smallest < 0 else largest
            raise InputError(f"prompt token ids must be in 0 … {self.vocab_size - 1}, found {found}")

    def cancel(self, index: int) -> None:
        """End request `index`, e.g. at a stop string: its slot is free before the next step."""
        if index in self._running:
            self._running[index].cancelled = True

    def generate(self, requests: Sequence[Request]) -> Iterator[TokenEvent]:
        """Yield tokens as they come; requests beyond max_num_seqs wait for the batch before them to end."""
        for request in requests:
            self.check(request)
        waiting = deque(enumerate(requests))
        while waiting:
            count = min(len(waiting), self.plan.limits.max_num_seqs, self.executor.slots)
            yield from self._batch([waiting.popleft() for _ in range(count)])

    def _batch(self, group: list[tuple[int, Request]]) -> Iterator[TokenEvent]:
        slots = [self._admit(index, request) for index, request in group]
        self._running = {s.index: s for s in slots}
        yield from self._prefill(slots)
        while True:
            slots = self._compact(slots)
            if not slots:
                break
            yield from self._decode(slots)
        self._running = {}

    def _admit(self, index: int, request: Request) -> _Sequence:
        end_ids = () if request.params.ignore_eos else request.end_ids
        sampler = SequenceSampler(request.params, self.vocab_size, request.prompt_token_ids, end_ids)
        room = self.plan.limits.max_model_len - len(request.prompt_token_ids)
        budget = min(room, request.params.max_tokens or room)
        ends = frozenset(end_ids) | frozenset(request.params.stop_token_ids or ())
        return _Sequence(index, request, sampler, budget, end_ids=ends)

    def _prefill(self, slots: list[_Sequence]) -> Iterator[TokenEvent]:
        prompts = [list(s.request.prompt_token_ids) for s in slots]
        for step in self._prefill_steps(prompts):
            start = time.perf_counter()
            yield from self._run(step, [slots[i] for i in step.slots], [len(prompts[i]) for i in step.slots], start)

    def _prefill_steps(self, prompts: list[list[int]]) -> Iterator[Step]:
        if self.executor.exact:
            limit = self.plan.limits.max_num_batched_tokens
            chunk = min(limit, self.executor.prompt_chunk or limit)
            for slot, prompt in enumerate(prompts):
                for start in range(0, len(prompt), chunk):
                    yield exact("prompt", [slot], [prompt[start : start + chunk]], [start])
            return
        for part in prefill_path(self.plan, [len(p) for p in prompts]):
            tokens = [prompts[row][a:b] for row, (a, b) in zip(part.rows, part.spans, strict=True)]
            yield pad(part.bucket, part.rows, tokens, [a for a, _ in part.spans])

    def _decode(self, slots: list[_Sequence]) -> Iterator[TokenEvent]:
        start = time.perf_counter()
        past = [s.cached for s in slots]
        tokens = [(s.last_token,) for s in slots]
        rows = range(len(slots))
        if self.executor.exact:
            step = exact("decode", rows, tokens, past)
        else:
            step = pad(self._decode_bucket(len(slots), max(past)), rows, tokens, past)
        yield from self._run(step, slots, None, start)

    def _decode_bucket(self, batch: int, context: int) -> Bucket:
        bucket = self.plan.lookup("decode", batch, 1, context)
        if bucket is None:
            raise ArtifactError(f"the plan has no decode bucket for batch {batch} and context {context}")
        return bucket

    def _run(
        self, step: Step, rows: list[_Sequence], complete_at: list[int] | None, start: float
    ) -> Iterator[TokenEvent]:
        """Run a step; rows whose prompt is complete (always, in decode) get a token."""
        prepared = time.perf_counter()
        logits = self.executor.run(step)
        executed = time.perf_counter()
        live = range(len(rows))
        for i in live:
            rows[i].cached = int(step.past_lengths[i] + step.new_lengths[i])
        live_rows = [i for i in live if complete_at is None or rows[i].cached == complete_at[i]]
        chosen = logits[: len(rows)] if len(live_rows) == len(rows) else logits[np.array(live_rows, np.int64)]
        ids = sample(chosen, [rows[i].sampler for i in live_rows]).tolist() if live_rows else []
        events = [self._token(rows[i], token) for i, token in zip(live_rows, ids, strict=True)]
        if self.keep_records:
            self.records.append(
                StepRecord(
                    step.phase, step.batch, step.query, step.context, len(rows), step.padding_tokens,
                    self.executor.executable_of(step), prepared - start, executed - prepared,
                    time.perf_counter() - executed, tuple(s.index for s in rows),
                )
            )  # fmt: skip
        self.steps += 1
        yield from events

    def _token(self, sequence: _Sequence, token: int) -> TokenEvent:
        sequence.last_token = token
        sequence.produced += 1
        reason: FinishReason | None = None
        if token in sequence.end_ids and sequence.produced >= sequence.request.params.min_tokens:
            reason = "stop"
        elif sequence.produced >= sequence.budget:
            reason = "length"
        if reason:
            sequence.cancelled = True
        return TokenEvent(sequence.index, token, reason, self.steps)

    def _compact(self, slots: list[_Sequence]) -> list[_Sequence]:
        """Drop finished sequences, moving the last live ones into their slots."""
        if not any(s.cancelled for s in slots):
            return slots
        slots = list(slots)
        at = 0
        while at < len(slots):
            if not slots[at].cancelled:
                at += 1
                continue
            last = len(slots) - 1
            mover = slots.pop()
            if at < last and not mover.cancelled:
                self.executor.copy_prefix(last, at, mover.cached)
                slots[at] = mover
        return slots
