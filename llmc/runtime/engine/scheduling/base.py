"""The scheduler's contract, and what its two kinds have in common. It knows token ids, slots and buckets, but no
clocks, logits or devices.

A sequence's life: added → waiting → admitted to a slot → prefilled in one or more steps (less what a prefix found in
another slot saves) → one decode step a token → finished or cancelled; its slot's tokens are then retained, so that a
later prompt that begins with them can copy them, until the slot is needed.

BucketScheduler (bucketed.py) is for executors that run buckets or exact rectangles, RaggedScheduler (ragged.py) for
those that take rows of any lengths. With the first, decode runs over slots 0 … n − 1, in order, since compiled decode
graphs take the first rows of the cache; sequences in prefill and retained prefixes live in the slots above, and
`ScheduledBatch.copies` keeps that so. With the second, a sequence stays in the slot that it got.
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
"""Called with (sequence, its prompt and answer so far, most): up to `most` guesses of the tokens that follow."""


@dataclass(frozen=True)
class SchedulerConfig:
    """How to schedule; what the plan fixes (buckets, limits) comes from the plan.

    `slots` cache slots, at least max_num_seqs + 1 where prefixes are to outlive a full batch. `exact`: the executor
    runs any shape, so that steps take live rows only, prompts one row at a time. `prompt_chunk`: tokens of a prompt
    step that run fastest there (None: as many as allowed). `prefill_budget`: while sequences decode, the prompt tokens
    (padding included) that may run between two decode steps, in tokens; one prompt step is always allowed, the
    smallest that the plan has for the place. `min_prefix`: the shortest prefix worth a copy, in tokens; 0: no reuse.
    `overtake`: how many later arrivals one step of priority is worth, so that no priority starves another.

    `rewind`: from where on a step may start anew in what a slot holds, which limits the prefixes that can be reused and
    the tokens that can be drafted.

    `ragged`: one step takes rows of any lengths in any slots, prompts and decode together; `prefill_budget` is then
    what prompts may add to a step in which sequences decode. `cache_tokens`, of ragged executors only: tokens that all
    slots together hold, each slot's rounded up to `block_tokens`; None: each slot has room for max_model_len.
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
    """A live row of a step: `tokens` of sequence `sequence` go to places start … start + len(tokens) − 1 of `slot`.

    `emits`: the row's logits give the sequence's next token (false where more of its prompt is to come). The last
    `drafted` of `tokens` are guesses, which hold as far as the logits before each of them give it. `adapter`: which of
    the bundle's adapters it gets, 0 for none.
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

    `admitted`: sequences that left the queue for this step, with the prompt tokens that a copied prefix saved each.
    `decode_rows`: how many of a ragged prompt step's first rows decode. `handed`: nothing is computed; each row is a
    whole prompt that another executor computed, to be put into its slot.
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
    """Counts of now: sequences by state, slots by use, tokens in the cache that belong to live sequences."""

    waiting: int
    prefilling: int
    decoding: int
    retained_slots: int
    free_slots: int
    live_tokens: int
    retained_tokens: int


class Scheduler(ABC):
    """Decides, step by step, what runs. Not thread-safe; equal calls give equal work.

    The caller loops: `work = next()`, runs it, then `complete(work, tokens, finished)`; `add` and `cancel` are allowed
    at any moment between these calls, also between `next` and `complete`. Raises InputError and ArtifactError as
    `check_config` does.
    """

    def __init__(self, plan: Plan, config: SchedulerConfig) -> None:
        check_config(plan, config)
        self._limits = plan.limits
        self._config = config
        self._known: dict[int, ScheduledSequence] = {}
        self._arrivals = 0
        self._empty()

    def _empty(self) -> None:
        """Nothing is queued, live or in a slot."""
        self._queue = WaitingQueue()
        self._slots: CacheSlots = self._new_slots()
        self._prefilling: list[ScheduledSequence] = []
        """Whose turn it is comes first."""
        self._decoding: list[ScheduledSequence] = []
        self._running: ScheduledBatch | None = None

    @abstractmethod
    def _new_slots(self) -> CacheSlots:
        """Slots of which nothing is known."""

    def add(
        self, sequence: int, prompt: Sequence[int], *, priority: int = 0, group: int | None = None,
        budget: int | None = None, handed: bool = False, adapter: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence with a new id, whose prompt the plan admits (`EngineCore.check`). Lower `priority` goes
        first, as in vLLM.

        Sequences of one `group` have the same prompt (n > 1), which is computed once. `budget`: tokens that the
        sequence makes at most (None: up to max_model_len), for which a shared pool of tokens keeps room. `handed`: its
        prompt is computed already, and its first step puts it into its slot. `adapter`: with which of the bundle's
        adapters; what was cached with another one is not reused. Raises InputError for an id that is taken, and for a
        prompt that fits no pool.
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
        """Tokens of a shared pool that a sequence with a prompt of `length` keeps for itself; 0 where there is none."""
        del length, budget
        return 0

    @abstractmethod
    def next(self) -> ScheduledBatch | None:
        """The next step, or None when there is nothing to run.

        Raises RuntimeError while a step is not complete; one that will never be ends with `reset`.
        """

    @abstractmethod
    def complete(self, work: ScheduledBatch, tokens: Mapping[int, Sequence[int]], finished: Set[int]) -> None:
        """Report what `work` gave: the next tokens of each sequence whose row emits, and which sequences end with them.

        One token, or where a row has drafts those that held and the one after them.
        """

    def cancel(self, sequence: int) -> None:
        """Forget a sequence; its slot is free, and what it holds retained, for the next `next`.

        Unknown ids are fine. A step that runs meanwhile keeps its row; `complete` ignores the row's tokens.
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
        """As `cancel`, for a sequence whose cache may hold NaN. Its tokens are not retained, and retained tokens that
        it may have copied are dropped."""
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
        """Forget all sequences and all that slots hold, e.g. after a step that failed or was interrupted."""
        for sequence in self._known.values():
            sequence.gone = True
        self._known.clear()
        self._empty()

    @property
    def occupancy(self) -> Occupancy:
        """Counts of now."""
        live = self._prefilling + self._decoding
        kept = [held.length for held in self._slots.retained if held is not None]
        return Occupancy(
            len(self._queue), len(self._prefilling), len(self._decoding), len(kept),
            self._config.slots - len(kept) - len(live), sum(sequence.cached for sequence in live), sum(kept),
        )  # fmt: skip

    def _require_complete(self) -> None:
        """Raise RuntimeError while a step runs."""
        if self._running is not None:
            raise RuntimeError("next() before complete() of the step before")

    def _completed(self, work: ScheduledBatch) -> None:
        """The step that runs is complete; raises RuntimeError where that is another than `work`."""
        if self._running is None or self._running is not work:
            raise RuntimeError("complete() of a step that next() did not give last")
        self._running = None

    def _hand_over(
        self, sequences: Sequence[ScheduledSequence], copies: tuple[Copy, ...], admitted: tuple[tuple[int, int], ...]
    ) -> ScheduledBatch:
        """The step in which the prompts of `sequences`, which have their slots, are put there."""
        rows = tuple(ScheduledRow(s.id, s.slot, 0, s.tokens[: s.prompt_length], True, 0, s.adapter) for s in sequences)
        self._running = ScheduledBatch("prompt", None, rows, copies, admitted, handed=True)
        return self._running

    def _took_over(
        self, sequences: Sequence[ScheduledSequence], tokens: Mapping[int, Sequence[int]], finished: Set[int]
    ) -> None:
        """The prompts of `sequences` are in their slots."""
        for sequence in sequences:
            if not sequence.gone:
                sequence.cached = sequence.prompt_length
                sequence.floor = 0 if self._config.rewind.free else sequence.cached
                self._prefilled(sequence, tokens, finished)

    def _written(self, rows: Sequence[ScheduledRow]) -> None:
        """A step with these rows begins: what it will have written limits where a later one may start."""
        rewind = self._config.rewind
        for row in () if rewind.free else rows:
            known = self._known[row.sequence]
            known.floor = max(known.floor, rewind.floor(row.start + len(row.tokens)))

    def _draftable(self, room: int) -> int:
        """Tokens that a step may draft for a sequence, and take back, where it has `room` for so many."""
        most = self._config.rewind.most
        return room if most is None else min(room, most)

    def _prefilled(self, sequence: ScheduledSequence, tokens: Mapping[int, Sequence[int]], finished: Set[int]) -> None:
        """All of a prompt is in the cache: its sequence decodes, or ended with its first token."""
        self._leave_prefill(sequence)
        if sequence.id in finished:
            self._end(sequence)
        else:
            sequence.tokens.extend(tokens[sequence.id])
            self._decoding.append(sequence)

    def _decoded(
        self, sequences: Sequence[ScheduledSequence], tokens: Mapping[int, Sequence[int]], finished: Set[int]
    ) -> None:
        """A decode row of each of `sequences` ran."""
        for sequence in sequences:
            if sequence.gone:
                continue
            built = tokens[sequence.id]
            sequence.tokens.extend(built)
            sequence.cached += len(built)
            if sequence.id in finished:
                self._leave(sequence)

    def _leave_prefill(self, sequence: ScheduledSequence) -> None:
        """`sequence` is no longer in prefill."""
        self._prefilling.remove(sequence)

    def _leave(self, sequence: ScheduledSequence) -> None:
        """A decoding sequence ended."""
        self._decoding.remove(sequence)
        self._end(sequence)

    def _end(self, sequence: ScheduledSequence) -> None:
        sequence.gone = True
        del self._known[sequence.id]
        if sequence.slot >= 0:
            self._slots.retire(sequence)


def check_config(plan: Plan, config: SchedulerConfig) -> None:
    """Raise InputError, naming the field, for a config that is out of range or does not fit the plan, and ArtifactError
    for a plan with gaps that no exact shape fills."""
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
            raise InputError(f"{name} {value} is more than {why}, {most}; lower it or plan anew")
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
        raise ArtifactError(f"the plan has no bucket for {gaps[0]}; plan anew and compile again")
