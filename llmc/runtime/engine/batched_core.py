"""Continuous batching: the scheduler plans a step, the executor runs its graph, the samplers choose tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmc.errors import DeviceError, InputError
from llmc.runtime.engine.core import EngineCore, StepOutput, TokenEvent
from llmc.runtime.engine.observer import HANDED_OVER, EngineStats, FinishReason, StepRecord
from llmc.runtime.engine.sampling.batch import finite, sample, sample_top
from llmc.runtime.engine.sampling.sampler import SequenceSampler
from llmc.runtime.engine.scheduling import open_scheduler
from llmc.runtime.engine.scheduling.base import ScheduledBatch, SchedulerConfig
from llmc.runtime.step import Step, exact, pad, ragged
from llmc.runtime.top_logits import TopLogits

if TYPE_CHECKING:
    from array import array

    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.kv_transfer import AwaitedPrompts, KVTransfer, Prefiller
    from llmc.runtime.engine.sampling.batch import Samplers, Take, TokenLogprobs
    from llmc.runtime.engine.sampling.filters import Logits
    from llmc.runtime.engine.scheduling.base import ScheduledRow
    from llmc.runtime.engine.speculation import SequenceDrafter, SpeculativeConfig
    from llmc.runtime.executors.base import Executor

RAGGED_PREFILL_BUDGET = 512
"""Default number of prompt tokens added to a ragged step's decode rows. Compared with 256, fewer steps contain prompts
(benchmarks/RESULTS.md: 1.02 of the throughput, 0.90 of the 95th percentile ITL).
"""

OnCompilation = Literal["ignore", "warn", "refuse"]
"""The reaction to a step that compiled a graph missing from the bundle; "refuse" raises DeviceError."""

_REQUESTED = "and VLLM_XLA_CHECK_RECOMPILATION requests an error: compile the bundle for this host and its toolchain"
_log = logging.getLogger("llmc")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits of each row (of each token if there are drafts), or only each row's largest logits."""

    logits: NDArray[np.float32] | None = None
    top: TopLogits | None = None


@dataclass(frozen=True, slots=True)
class AcceptedDrafts:
    """The first `held` drafts of row `row` were accepted."""

    row: int
    held: int


@dataclass(slots=True)
class _Sequence:
    sampler: SequenceSampler
    budget: int
    least: int
    ends: frozenset[int]
    drafter: SequenceDrafter | None = None
    produced: int = field(default=0)


class BatchedCore(EngineCore):
    """Runs sequences on the bucketed graphs of one executor. Not thread-safe.

    `prefill_budget` limits the prompt tokens that delay running sequences (default: the executor's prompt_chunk, or
    RAGGED_PREFILL_BUDGET). `min_prefix` is the shortest prefix that is reused (0: none). Both are in tokens;
    SchedulerConfig has the details. `speculation` enables drafts; raises InputError if the executor cannot verify any.
    `prefiller` computes prompts on another executor; prompts that it rejects or fails run here.
    """

    def __init__(
        self, plan: Plan, executor: Executor, vocab_size: int, *, prefill_budget: int | None = None,
        min_prefix: int | None = None, on_compilation: OnCompilation = "warn",
        speculation: SpeculativeConfig | None = None, prefiller: Prefiller | None = None,
    ) -> None:  # fmt: skip
        if speculation is not None:
            from llmc.runtime.engine.speculation import require_verifiable

            require_verifiable(executor)
        room, can = plan.limits.max_model_len, executor.capabilities
        if can.cache_tokens is not None:
            room = can.cache_tokens // can.block_tokens * can.block_tokens
        super().__init__(plan, executor, vocab_size, room)
        self.speculation = speculation
        budget = prefill_budget or can.prompt_chunk or (RAGGED_PREFILL_BUDGET if can.ragged else None)
        chosen: dict[str, Any] = {"prefill_budget": budget, "min_prefix": min_prefix}
        self.config = SchedulerConfig(
            max_num_seqs=min(plan.limits.max_num_seqs, executor.slots), slots=executor.slots, exact=can.exact,
            ragged=can.ragged, cache_tokens=can.cache_tokens, block_tokens=can.block_tokens,
            prompt_chunk=can.prompt_chunk, rewind=executor.bundle.cache_shape.rewind,
            **{k: v for k, v in chosen.items() if v is not None},
        )  # fmt: skip
        self.scheduler = open_scheduler(plan, self.config, None if speculation is None else self._draft)
        self._awaited: AwaitedPrompts | None = None
        if prefiller is not None and executor.bundle.cache_shape.states:
            raise InputError(
                f"{executor.bundle.path}: its model has recurrent state, which KV transfer does not support: "
                "leave the executor for prompts out"
            )
        if prefiller is not None and executor.bundle.adapters:
            raise InputError(
                f"{executor.bundle.path}: requests select a LoRA adapter, which the executor for prompts does not "
                "apply: leave the executor for prompts out"
            )
        if prefiller is not None:
            from llmc.runtime.engine.kv_transfer import AwaitedPrompts

            self._awaited = AwaitedPrompts(prefiller)
        self._sequences: dict[int, _Sequence] = {}
        self._names: dict[Any, str] = {}
        self._on_compilation = on_compilation
        if on_compilation == "refuse" and executor.compilations.count:
            what = ", ".join(executor.compilations.compiled)
            raise DeviceError(f"{what}: compiled when the bundle was opened, {_REQUESTED}")

    @property
    def max_num_seqs(self) -> int:
        """The smaller of the plan's max_num_seqs and the cache's slots."""
        return self.config.max_num_seqs

    def add(
        self, sequence: int, prompt: Sequence[int], sampler: SequenceSampler, *, priority: int = 0,
        group: int | None = None, adapter: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence; EngineCore.add documents the arguments."""
        params = sampler.params
        budget = self._budget(prompt, params)
        ends = frozenset(sampler.end_ids) | frozenset(params.stop_token_ids or ())
        if self._awaited is not None and len(prompt) <= self._awaited.prefiller.longest_prompt:
            self._awaited.ask(sequence, prompt, priority=priority, group=group, budget=budget)
        else:
            self.scheduler.add(sequence, prompt, priority=priority, group=group, budget=budget, adapter=adapter)
        drafter = None
        if self.speculation is not None:
            from llmc.runtime.engine.speculation import SequenceDrafter

            drafter = SequenceDrafter(self.speculation)
        self._sequences[sequence] = _Sequence(sampler, budget, params.min_tokens, ends, drafter)

    def forget_slots(self) -> None:
        """Forget cached tokens, because something else ran in the slots. Raises RuntimeError while there is work."""
        if self._sequences:
            raise RuntimeError("slots of sequences that run cannot be forgotten")
        self.scheduler.reset()

    def cancel(self, sequence: int) -> None:
        """Cancel a sequence, for example at a stop string. Its slot is free before the next step."""
        if self._sequences.pop(sequence, None) is not None:
            if self._awaited is not None:
                self._awaited.forget(sequence)
            self.scheduler.cancel(sequence)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._sequences)

    @property
    def waits(self) -> bool:
        """Whether nothing can run until the prefill side has results."""
        one = self._awaited
        return one is not None and len(one) == len(self._sequences) > 0 and not one.prefiller.has_news

    @property
    def prefiller(self) -> Prefiller | None:
        """The component that computes prompts on another executor, or None."""
        return None if self._awaited is None else self._awaited.prefiller

    @property
    def stats(self) -> EngineStats:
        """Current gauges, counted in sequences."""
        o = self.scheduler.occupancy
        compiled = self.executor.compilations.count + (0 if self.prefiller is None else self.prefiller.compilations)
        offsets = self.config.cache_tokens or self.config.slots * self.plan.limits.max_model_len
        return EngineStats(
            o.prefilling + o.decoding, o.waiting, self.config.slots, o.retained_slots, o.live_tokens / offsets,
            self.steps, compiled, len(self.executor.compilations.at_open),
        )  # fmt: skip

    def step(self) -> StepOutput | None:
        """Run one step; None if there is nothing to do. If `waits`, it first waits for the prefill side.

        A sequence with NaN logits or a failed constraint ends with the reason "error", and its cached tokens are not
        reused; other sequences continue. Raises the executor's errors. Then every sequence is forgotten, and the engine
        can be used again.
        """
        started = time.perf_counter()
        try:
            if self._awaited is not None:
                if self.waits:
                    self._awaited.prefiller.wait()
                self._take_prompts(self._awaited)
            work = self.scheduler.next()
            return None if work is None else self._run(work, started)
        except BaseException:
            self.scheduler.reset()
            self._sequences.clear()
            if self._awaited is not None:
                self._awaited.clear()
            raise

    def _take_prompts(self, awaited: AwaitedPrompts) -> None:
        """Queue prompts that the prefill side computed. Those that it failed are queued for prefill here."""
        for prompt, failure in awaited.news():
            if failure is not None:
                _log.warning("prompt %d was not computed by the prefill side: %s", prompt.number, failure.reason)
            group = prompt.number if len(prompt.sequences) > 1 else None
            for sequence, budget in prompt.sequences.items():
                self.scheduler.add(
                    sequence, prompt.prompt, priority=prompt.priority, group=group, budget=budget,
                    handed=failure is None,
                )  # fmt: skip

    def _report_compilation(self, step: Step, what: str) -> None:
        if self._on_compilation == "refuse":
            raise DeviceError(f"{what} was compiled while serving, in step {self.steps} ({step.phase}), {_REQUESTED}")
        if self._on_compilation == "warn":
            _log.warning("unplanned compilation in step %d (%s): %s", self.steps, step.phase, what)

    def _run(self, work: ScheduledBatch, started: float) -> StepOutput:
        compiled = self.executor.compilations.count
        for copy in work.copies:
            self.executor.copy_prefix(copy.source, copy.target, copy.length)
        scheduled = time.perf_counter()
        step = step_of(work, self.config.ragged or work.handed)
        prepared = time.perf_counter()
        samplers = [s.sampler if (s := self._sequences.get(row.sequence)) else None for row in work.rows]
        handed: dict[int, KVTransfer] = {}
        if work.handed and self._awaited is not None:
            logits, handed = self._awaited.put(self.executor, work)
            replayed = StepResult(logits)
        else:
            replayed = replay(self.executor, step, work, samplers)
        executed = time.perf_counter()
        missed = self.executor.compilations.count > compiled
        if missed:
            self._report_compilation(step, ", ".join(self.executor.compilations.compiled[compiled:]))
        tokens: list[TokenEvent] = []
        built: dict[int, list[int]] = {}

        def take(i: int, token: int | None, logprobs: TokenLogprobs | None) -> bool:
            sequence = work.rows[i].sequence
            if token is None:
                unsound = self._sequences[sequence].sampler.unsound
                (self.scheduler.fail if unsound else self.scheduler.cancel)(sequence)
                tokens.append(TokenEvent(sequence, None, "error"))
            else:
                tokens.append(self._token(sequence, token, logprobs))
                built.setdefault(sequence, []).append(token)
            return tokens[-1].finish_reason is None

        drafts = choose(self.executor, replayed, work, samplers, take)
        for one in drafts:
            row = work.rows[one.row]
            drafter = self._sequences[row.sequence].drafter
            if drafter is not None:
                drafter.verified(row.start + 1 + len(built.get(row.sequence, ())), row.drafted, one.held)
        finished = {t.sequence for t in tokens if t.finish_reason}
        self.scheduler.complete(work, built, finished)
        for sequence in finished:
            why = self._sequences.pop(sequence).sampler.failure
            if why is not None:
                _log.warning("sequence %d failed: %s", sequence, why)
        self.steps += 1
        executable = HANDED_OVER if work.handed else self._executable(step)
        record = StepRecord(
            step.phase, step.batch, step.query, step.context, len(work.rows), step.live_tokens, step.padding_tokens,
            executable, prepared - scheduled, executed - prepared, time.perf_counter() - executed,
            tuple(row.sequence for row in work.rows), started, scheduled - started, missed,
            len(drafts), sum(row.drafted for row in work.rows), sum(one.held for one in drafts),
            tuple((step.past_lengths + step.new_lengths)[: len(work.rows)].tolist()),
        )  # fmt: skip
        return StepOutput(record, tokens, work.admitted, handed)

    def _draft(self, sequence: int, tokens: array[int], most: int) -> Sequence[int]:
        """Drafts for a decode row, limited to the tokens that the sequence may still generate."""
        known = self._sequences.get(sequence)
        if known is None or known.drafter is None:
            return ()
        return known.drafter.propose(tokens, min(most, known.budget - known.produced - 1))

    def _token(self, number: int, token: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        sequence = self._sequences[number]
        sequence.produced += 1
        ends = token in sequence.ends and sequence.produced >= sequence.least
        reason: FinishReason | None = None
        if sequence.sampler.failure is not None:
            reason = "error"
        elif ends or sequence.sampler.finished:
            reason = "stop"
        elif sequence.produced >= sequence.budget:
            reason = "length"
        return TokenEvent(number, token, reason, logprobs, ends)

    def _executable(self, step: Step) -> str:
        key: Any = (step.phase, step.batch, step.query, step.context)
        if self.executor.capabilities.exact:
            # one for any shape, or some for frequent numbers of tokens
            key = step.live_tokens if self.executor.capabilities.ragged else None
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self.executor.executable_of(step)
        return name


def step_of(work: ScheduledBatch, takes_ragged: bool) -> Step:
    """Create the executor's step for `work`, padded if it has a bucket."""
    step = _without_adapters(work, takes_ragged)
    adapters = tuple([row.adapter for row in work.rows])
    return replace(step, adapters=adapters) if any(adapters) else step


def _without_adapters(work: ScheduledBatch, takes_ragged: bool) -> Step:
    slots, tokens = [row.slot for row in work.rows], [row.tokens for row in work.rows]
    past = [row.start for row in work.rows]
    if takes_ragged:
        return ragged(work.phase, slots, tokens, past, work.decode_rows)
    if work.bucket is None:
        return exact(work.phase, slots, tokens, past)
    return pad(work.bucket, slots, tokens, past)


def replay(executor: Executor, step: Step, work: ScheduledBatch, samplers: Samplers) -> StepResult:
    """Run the step and fetch only the logits that the samplers need. Raises the executor's errors."""
    if any(row.drafted for row in work.rows):
        return StepResult(executor.run_each(step))
    k = executor.bundle.sample_top_k
    if k and all(samplers[i].served_by_top(k) for i in _emitting(work, samplers)):  # type: ignore[union-attr]
        return StepResult(top=executor.run_top(step))
    return StepResult(executor.run(step))


def choose(
    executor: Executor, replayed: StepResult, work: ScheduledBatch, samplers: Samplers, take: Take
) -> list[AcceptedDrafts]:
    """Call `take` with each emitting row's token, or with its accepted drafts and the token after them.

    Returns how many drafts were accepted, for rows that had some.
    """
    if any(row.drafted for row in work.rows):
        assert replayed.logits is not None
        return verify(replayed.logits, work.rows, samplers, take)
    for i, row in enumerate(work.rows):
        sampler = samplers[i]
        if not row.emits and sampler is not None:
            read = replayed.logits if replayed.top is None else replayed.top.values
            assert read is not None
            if not finite(read[i], sampler):
                take(i, None, None)
    emitting = _emitting(work, samplers)
    if not emitting:
        return []
    wanted = [one for i in emitting if (one := samplers[i]) is not None]
    rows: Any = slice(len(emitting)) if emitting[-1] == len(emitting) - 1 else np.array(emitting)
    if replayed.top is not None:
        chosen = sample_top(replayed.top.rows(rows), wanted, lambda: executor.logits()[rows])
    else:
        assert replayed.logits is not None
        chosen = sample(replayed.logits[rows], wanted)
    for i, token, logprobs in zip(emitting, chosen.ids, chosen.logprobs, strict=True):
        take(i, token, logprobs)
    return []


def verify(logits: Logits, rows: Sequence[ScheduledRow], samplers: Samplers, take: Take) -> list[AcceptedDrafts]:
    """Sample after each token of each row until a token differs from the draft or ends its sequence.

    `logits` [sum of the rows' tokens, V] follow every token, row by row. samplers[i] belongs to rows[i], a decode row;
    None if nobody waits for it. `take` receives each token once, in order within a sequence, and None if the sequence
    fails. Returns how many drafts were accepted, for rows that had some.
    """
    starts = [0, *accumulate(len(row.tokens) for row in rows)]
    held = [0] * len(rows)
    going = [i for i, sampler in enumerate(samplers) if sampler is not None]
    index = 0
    while going:
        chosen = sample(logits[[starts[i] + index for i in going]], [s for i in going if (s := samplers[i])])
        still = []
        for i, token, logprobs in zip(going, chosen.ids, chosen.logprobs, strict=True):
            goes_on = take(i, token, logprobs)
            if index < rows[i].drafted and token == rows[i].tokens[index + 1]:
                held[i] += 1
                if goes_on:
                    still.append(i)
        going = still
        index += 1
    return [AcceptedDrafts(i, held[i]) for i, row in enumerate(rows) if row.drafted and samplers[i] is not None]


def _emitting(work: ScheduledBatch, samplers: Samplers) -> list[int]:
    return [i for i, row in enumerate(work.rows) if row.emits and samplers[i] is not None]
