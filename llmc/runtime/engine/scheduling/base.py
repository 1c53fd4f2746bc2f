"""The scheduler's contract and common part. It knows tokens, slots and buckets, but no clocks, logits or devices.

A sequence is added, waits, and is admitted to a slot. It is prefilled in one or more steps, except for a prefix that
another slot holds, then gets one token per decode step until it is finished or cancelled. Its slot then retains the
tokens, until the slot is needed, so that a later prompt with the same prefix can copy them.

BucketScheduler (bucketed.py) serves executors that run buckets or exact rectangles, RaggedScheduler (ragged.py) those
that take rows of any lengths. With buckets, decode runs over slots 0 … n − 1 in order, because compiled decode graphs
take the first rows of the cache. Sequences in prefill and retained prefixes are in higher slots;
`ScheduledBatch.copies` maintains this. With ragged rows, a sequence stays in its slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmc.buckets.coverage import prove
from llmc.errors import ArtifactError, InputError
from llmc.runtime.cache_shape import ANYWHERE, Rewind
from llmc.runtime.engine.scheduling.queue import ScheduledSequence, WaitingQueue
from llmc.runtime.engine.scheduling.slots import CacheSlots, Copy, common_prefix

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket, Phase
    from llmc.buckets.plan import Plan

Drafter = Callable[[int, "array[int]", int], Sequence[int]]
"""Called with (sequence, its tokens so far, most); returns up to `most` drafts of the tokens that follow."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Scheduling options; buckets and limits come from the plan.

    `slots`: cache slots, at least max_num_seqs + 1 if prefixes should outlive a full batch. `exact`: the executor runs
    any shape, so steps have live rows only and prompts run one row at a time. `prompt_chunk`: the fastest prefill size
    in tokens (None: as large as allowed). `prefill_budget`: the prompt tokens, padding included, that may run between
    two decode steps; one prefill of the smallest planned size is always allowed. `min_prefix`: the shortest prefix
    worth a copy, in tokens; 0 disables reuse. `overtake`: how many later arrivals one priority level is worth, so that
    no priority starves another.

    `rewind`: where a step may restart in a slot, which limits reusable prefixes and drafts.

    `ragged`: one step takes rows of any lengths in any slots, prefill and decode mixed; `prefill_budget` then limits
    the prompt tokens of a step with decode rows. `cache_tokens`, ragged executors only: tokens that all slots share,
    each slot rounded up to `block_tokens`; None: each slot has room for max_model_len.
    """

    max_num_seqs: int
    slots: int
    exact: bool = False
    ragged: bool = False
    cache_tokens: int | None = None
    block_tokens: int = 1
    prompt_chunk: int | None = None
    prefill_budget: int = 512
    min_prefix: int = 16
    overtake: int = 64
    rewind: Rewind = ANYWHERE


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A live row: `tokens` of sequence `sequence`, at positions start … start + len(tokens) − 1 of `slot`.

    `emits`: the row's logits give the sequence's next token (false if more of its prompt follows). The last `drafted`
    of `tokens` are drafts, valid as far as the logits before them confirm. `adapter`: the bundle's adapter number, 0
    for none.
    """

    sequence: int
    slot: int
    start: int
    tokens: Sequence[int]
    emits: bool
    drafted: int = 0
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: `copies` first, in order, then `rows` as one batch of `bucket` (None: exact shape).

    `admitted`: sequences that left the queue for this step, with the prompt tokens that a copied prefix saved.
    `decode_rows`: how many leading rows of a ragged prefill decode. `handed`: nothing is computed; each row is a
    whole prompt from another executor, to be imported into its slot.
    """

    phase: Phase
    bucket: Bucket | None
    rows: tuple[ScheduledRow, ...]
    copies: tuple[Copy, ...] = ()
    admitted: tuple[tuple[int, int], ...] = ()
    handed: bool = False
    decode_rows: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Current counts: sequences by state, slots by use, and cached tokens of live sequences."""

    waiting: int
    prefilling: int
    decoding: int
    retained_slots: int
    free_slots: int
    live_tokens: int
    retained_tokens: int


class Scheduler(ABC):
    """Decides step by step what runs. Deterministic, not thread-safe.

    The caller loops: `work = next()`, run it, then `complete(work, tokens, finished)`. `add` and `cancel` are allowed
    at any time, also between `next` and `complete`. Raises InputError and ArtifactError as `check_config` does.
    """

    def __init__(self, plan: Plan, config: SchedulerConfig) -> None:
        check_config(plan, config)
        self._limits = plan.limits
        self._config = config
        self._known: dict[int, ScheduledSequence] = {}
        self._arrivals = 0
        self._empty()

    def _empty(self) -> None:
        self._queue = WaitingQueue()
        self._slots: CacheSlots = self._new_slots()
        self._prefilling: list[ScheduledSequence] = []
        """Ordered by turn."""
        self._decoding: list[ScheduledSequence] = []
        self._running: ScheduledBatch | None = None

    @abstractmethod
    def _new_slots(self) -> CacheSlots:
        """Slots of which nothing is known."""

    def add(
        self, sequence: int, prompt: Sequence[int], *, priority: int = 0, group: int | None = None,
        budget: int | None = None, handed: bool = False, adapter: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence with a new id, whose prompt the plan admits (`EngineCore.check`). Low `priority` goes first.

        Sequences of one `group` have the same prompt (n > 1), which is computed once. `budget`: the tokens that the
        sequence generates at most (None: up to max_model_len), for which a shared pool reserves room. `handed`: another
        executor computed the prompt, and the first step imports it. `adapter`: the bundle's adapter number; tokens
        cached with another adapter are not reused. Raises InputError for a used id and for a prompt that does not fit
        the pool.
        """
        if sequence in self._known:
            raise InputError(f"sequence {sequence} is queued or running already; give each sequence an id of its own")
        reserved = self._reservation(len(prompt), budget)
        self._arrivals += 1
        rank = self._arrivals + self._config.overtake * priority
        added = ScheduledSequence(
            sequence, array("q", prompt), len(prompt), self._arrivals, rank, group, reserved=reserved, handed=handed,
            adapter=adapter,
        )  # fmt: skip
        self._known[sequence] = added
        self._queue.push(added)

    def _reservation(self, length: int, budget: int | None) -> int:
        """Shared-pool tokens that a sequence with a prompt of `length` reserves; 0 without a pool."""
        del length, budget
        return 0

    @abstractmethod
    def next(self) -> ScheduledBatch | None:
        """The next step, or None if there is nothing to run.

        Raises RuntimeError while a step is incomplete; `reset` abandons one that will not complete.
        """

    @abstractmethod
    def complete(self, work: ScheduledBatch, tokens: Mapping[int, Sequence[int]], finished: Set[int]) -> None:
        """Report a step's results: the next tokens of each emitting sequence, and which sequences end with them.

        A row with drafts has its accepted drafts and the token after them, other rows one token.
        """

    def cancel(self, sequence: int) -> None:
        """Forget a sequence. Its slot is free for the next step and retains its tokens.

        Unknown ids are ignored. A running step keeps the row; `complete` ignores its tokens.
        """
        known = self._known.get(sequence)
        if known is None:
            return
        if known.slot < 0:
            self._end(known)
            self._queue.discard(known)
        elif known in self._prefilling:
            self._leave_prefill(known)
            self._end(known)
        else:
            self._leave(known)

    def fail(self, sequence: int) -> None:
        """Cancel a sequence whose cache may hold NaN, and drop its tokens and retained tokens it may have copied."""
        known = self._known.get(sequence)
        if known is None:
            return
        prompt, least = np.frombuffer(known.tokens, np.int64), max(1, self._config.min_prefix)
        for slot, kept in enumerate(self._slots.retained):
            if kept is None or kept.adapter != known.adapter:
                continue
            if common_prefix(prompt, kept.tokens, min(kept.length, len(prompt))) >= least:
                self._slots.drop(slot)
        known.cached = 0
        self.cancel(sequence)

    def reset(self) -> None:
        """Forget all sequences and all slots' contents, for example after a failed or interrupted step."""
        for sequence in self._known.values():
            sequence.gone = True
        self._known.clear()
        self._empty()

    @property
    def occupancy(self) -> Occupancy:
        """Current counts."""
        live = self._prefilling + self._decoding
        kept = [held.length for held in self._slots.retained if held is not None]
        return Occupancy(
            len(self._queue), len(self._prefilling), len(self._decoding), len(kept),
            self._config.slots - len(kept) - len(live), sum(sequence.cached for sequence in live), sum(kept),
        )  # fmt: skip

    def _require_complete(self) -> None:
        if self._running is not None:
            raise RuntimeError("next() before complete() of the step before")

    def _completed(self, work: ScheduledBatch) -> None:
        """Mark the running step as complete; raises RuntimeError if `work` is another step."""
        if self._running is None or self._running is not work:
            raise RuntimeError("complete() of a step that next() did not give last")
        self._running = None

    def _hand_over(
        self, sequences: Sequence[ScheduledSequence], copies: tuple[Copy, ...], admitted: tuple[tuple[int, int], ...]
    ) -> ScheduledBatch:
        """The step that imports the prompts of `sequences` into their slots."""
        rows = tuple(ScheduledRow(s.id, s.slot, 0, s.tokens[: s.prompt_length], True, 0, s.adapter) for s in sequences)
        self._running = ScheduledBatch("prompt", None, rows, copies, admitted, handed=True)
        return self._running

    def _took_over(
        self, sequences: Sequence[ScheduledSequence], tokens: Mapping[int, Sequence[int]], finished: Set[int]
    ) -> None:
        """The prompts of `sequences` were imported."""
        for sequence in sequences:
            if not sequence.gone:
                sequence.cached = sequence.prompt_length
                sequence.floor = 0 if self._config.rewind.free else sequence.cached
                self._prefilled(sequence, tokens, finished)

    def _written(self, rows: Sequence[ScheduledRow]) -> None:
        """A step with these rows begins; the tokens it writes limit where a later step may start."""
        rewind = self._config.rewind
        for row in () if rewind.free else rows:
            known = self._known[row.sequence]
            known.floor = max(known.floor, rewind.floor(row.start + len(row.tokens)))

    def _draftable(self, room: int) -> int:
        """Drafts that a step may add for a sequence, and take back, given `room` for so many."""
        most = self._config.rewind.most
        return room if most is None else min(room, most)

    def _prefilled(self, sequence: ScheduledSequence, tokens: Mapping[int, Sequence[int]], finished: Set[int]) -> None:
        """The whole prompt is cached: the sequence decodes, or ended with its first token."""
        self._leave_prefill(sequence)
        if sequence.id in finished:
            self._end(sequence)
        else:
            sequence.tokens.extend(tokens[sequence.id])
            self._decoding.append(sequence)

    def _decoded(
        self, sequences: Sequence[ScheduledSequence], tokens: Mapping[int, Sequence[int]], finished: Set[int]
    ) -> None:
        for sequence in sequences:
            if sequence.gone:
                continue
            built = tokens[sequence.id]
            sequence.tokens.extend(built)
            sequence.cached += len(built)
            if sequence.id in finished:
                self._leave(sequence)

    def _leave_prefill(self, sequence: ScheduledSequence) -> None:
        self._prefilling.remove(sequence)

    def _leave(self, sequence: ScheduledSequence) -> None:
        self._decoding.remove(sequence)
        self._end(sequence)

    def _end(self, sequence: ScheduledSequence) -> None:
        sequence.gone = True
        del self._known[sequence.id]
        if sequence.slot >= 0:
            self._slots.retire(sequence)


def check_config(plan: Plan, config: SchedulerConfig) -> None:
    """Raise InputError naming a field that is out of range or does not fit the plan.

    Raises ArtifactError for a plan with gaps that no exact shape fills.
    """
    limits = plan.limits
    for name, value, least, most, why in (
        ("max_num_seqs", config.max_num_seqs, 1, limits.max_num_seqs, "the plan's max_num_seqs"),
        ("slots", config.slots, config.max_num_seqs, None, "max_num_seqs"),
        ("prompt_chunk", 1 if config.prompt_chunk is None else config.prompt_chunk, 1, None, ""),
        ("prefill_budget", config.prefill_budget, 1, None, ""),
        ("min_prefix", config.min_prefix, 0, None, ""),
        ("overtake", config.overtake, 0, None, ""),
        ("block_tokens", config.block_tokens, 1, None, ""),
    ):
        if value < least:
            raise InputError(f"{name} {value} must be at least {least}" + (f" ({why})" if most is None and why else ""))
        if most is not None and value > most:
            raise InputError(f"{name} {value} is more than {why}, {most}; lower it or plan again")
    if config.cache_tokens is not None:
        if not config.ragged:
            raise InputError(
                f"cache_tokens {config.cache_tokens}: only a ragged executor's slots share a pool of tokens"
            )
        if config.cache_tokens < config.block_tokens:
            raise InputError(
                f"cache_tokens {config.cache_tokens} is less than one block of {config.block_tokens} tokens; "
                "give the KV cache more space"
            )
    gaps = [] if config.exact else prove(plan.limits, plan.buckets)
    if gaps:
        raise ArtifactError(f"the plan has no bucket for {gaps[0]}; plan and compile again")
