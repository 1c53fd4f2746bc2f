"""The contract of the scheduler. It knows token ids, slots and buckets, but no clocks, logits or devices.

A sequence's life: added → waiting → admitted to a slot → prefilled in one or more steps (less what a prefix found in
another slot saves) → one decode step a token → finished or cancelled; its slot's tokens are then retained, so that a
later prompt that begins with them can copy them, until the slot is needed.

Two schedulers: Scheduler (scheduler.py) for executors that run buckets or exact rectangles, RaggedScheduler (ragged.py)
for those that take rows of any lengths. With the first, decode runs over slots 0 … n − 1, in order, since compiled
decode graphs take the first rows of the cache; sequences in prefill and retained prefixes live in the slots above, and
`ScheduledBatch.copies` keeps that so. With the second, a sequence stays in the slot that it got.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llmc.runtime.cache_shape import ANYWHERE, Rewind

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket, Phase


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
class Row:
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
class Copy:
    """Copy the first `length` cached tokens of slot `source` to slot `target`, which then holds nothing else.

    Where slots share a pool of tokens, the two may be the same slot, which is then cut to `length` tokens.
    """

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: `copies` first, in order, then `rows` as one batch of `bucket` (None: exact shape).

    `admitted`: sequences that left the queue for this step, with the prompt tokens that a copied prefix saved each.
    `decode_rows`: how many of a ragged prompt step's first rows decode. `handed`: nothing is computed; each row is a
    whole prompt that another executor computed, to be put into its slot.
    """

    phase: Phase
    bucket: Bucket | None
    rows: tuple[Row, ...]
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


class Drafter(Protocol):
    """Guesses what comes next in a sequence: llmc/runtime/engine/speculation."""

    def __call__(self, sequence: int, tokens: array[int], most: int) -> Sequence[int]:
        """Up to `most` guesses of what follows `tokens`, prompt and answer so far, of sequence `sequence`."""


class StepScheduler(ABC):
    """Decides, step by step, what runs. Not thread-safe; equal calls give equal work.

    The caller loops: `work = next()`, runs it, then `complete(work, tokens, finished)`; `add` and `cancel` are allowed
    at any moment between these calls, also between `next` and `complete`.
    """

    @abstractmethod
    def add(
        self, sequence: int, prompt: Sequence[int], *, priority: int = 0, group: int | None = None,
        budget: int | None = None, handed: bool = False, adapter: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence with a new id. Lower `priority` goes first, as in vLLM.

        Sequences of one `group` have the same prompt (n > 1), which is computed once. `budget`: tokens that the
        sequence makes at most (None: up to max_model_len), for which a shared pool of tokens keeps room. `handed`: its
        prompt is computed already, and its first step puts it into its slot. `adapter`: with which of the bundle's
        adapters; what was cached with another one is not reused. Raises
        InputError, naming the limit, for a prompt that the plan does not admit, or that fits no pool.
        """

    @abstractmethod
    def cancel(self, sequence: int) -> None:
        """Forget a sequence; its slot is free, and what it holds retained, for the next `next`.

        Unknown ids are fine. A step that runs meanwhile keeps its row; `complete` ignores the row's tokens.
        """

    @abstractmethod
    def fail(self, sequence: int) -> None:
        """As `cancel`, for a sequence whose cache may hold NaN. Its tokens are not retained, and retained tokens that
        it may have copied are dropped."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all sequences and all that slots hold, e.g. after a step that failed or was interrupted."""

    @abstractmethod
    def next(self) -> ScheduledBatch | None:
        """The next step, or None when there is nothing to run.

        Raises RuntimeError while a step is not complete; one that will never be ends with `reset`.
        """

    @abstractmethod
    def complete(self, work: ScheduledBatch, tokens: Mapping[int, Sequence[int]], finished: Set[int]) -> None:
        """Say what `work` gave: the next tokens of each sequence whose row emits, and which sequences end with them.

        One token, or where a row has drafts those that held and the one after them.
        """

    @property
    @abstractmethod
    def occupancy(self) -> Occupancy:
        """Counts of now."""
