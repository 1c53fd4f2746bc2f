"""What the scheduler takes and gives. It knows token ids, slots and buckets, and neither clocks, logits nor devices.

A sequence's life: added → waiting → admitted to a slot → prefilled in one or more steps (less what a prefix found in
another slot saves) → one decode step a token → finished or cancelled; its slot's tokens are then retained, so that a
later prompt that begins with them can copy them, until the slot is needed.

Slots: decode runs over slots 0 … n − 1, in order, since compiled decode graphs take the first rows of the cache.
Sequences in prefill and retained prefixes live in the slots above. `Work.copies` keeps that so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """

    max_num_seqs: int
    slots: int
    exact: bool = False
    prompt_chunk: int | None = None
    prefill_budget: int = 512
    min_prefix: int = 16
    overtake: int = 64


@dataclass(frozen=True, slots=True)
class Row:
    """A live row of a step: `tokens` of sequence `sequence` go to places start … start + len(tokens) − 1 of `slot`.

    `emits`: the row's logits give the sequence's next token (false where more of its prompt is to come).
    """

    sequence: int
    slot: int
    start: int
    tokens: Sequence[int]
    emits: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `length` cached tokens of slot `source` to slot `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Work:
    """One step: `copies` first, in order, then `rows` as one batch of `bucket` (None: exact shape).

    `admitted`: sequences that left the queue for this step, with the prompt tokens that a copied prefix saved each.
    """

    phase: Phase
    bucket: Bucket | None
    rows: tuple[Row, ...]
    copies: tuple[Copy, ...] = ()
    admitted: tuple[tuple[int, int], ...] = ()


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
