"""The scheduler for executors that take rows of any lengths in one step; base.py has the types.

A step has a row for each decoding sequence, plus prompt tokens up to `prefill_budget`, first come first served. No
sequence waits for others' steps, and prompts lengthen a step by at most the budget (chunked prefill as in vLLM, dynamic
split-fuse in DeepSpeed). If nothing decodes, prompts fill the step up to the plan's largest prompt bucket, or
`prompt_chunk`.

A sequence leaves the queue when its first tokens run. If the current step computes tokens of its prefix, it waits one
step to find them in the cache, so prompts with a common prefix that arrive together compute it once. With a shared
token pool, the first in the queue also waits until its whole reservation fits (SlotPool); those behind it wait too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from llmc.errors import InputError
from llmc.runtime.engine.scheduling.base import Drafter, ScheduledBatch, ScheduledRow, Scheduler, SchedulerConfig
from llmc.runtime.engine.scheduling.queue import ScheduledSequence
from llmc.runtime.engine.scheduling.slots import Match, SlotPool, common_prefix, longest_match

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan

_Part = tuple[ScheduledSequence, int]
"""A prompt, and how many of its tokens are cached after the step."""


class RaggedScheduler(Scheduler):
    """Schedules rows of any lengths, as the module docstring describes. `drafter` is used if every row decodes.

    Raises InputError naming a field that is out of range or does not fit the plan.
    """

    _slots: SlotPool

    def __init__(self, plan: Plan, config: SchedulerConfig, drafter: Drafter | None = None) -> None:
        super().__init__(plan, config)
        self._drafter = drafter
        self._most = min(plan.limits.max_num_batched_tokens, max(bucket.tokens for bucket in plan.prompt))
        """Largest number of prompt tokens in a step without decode rows."""
        if config.prompt_chunk is not None:
            self._most = min(self._most, config.prompt_chunk)

    def _empty(self) -> None:
        super()._empty()
        self._rows: tuple[list[ScheduledSequence], list[_Part]] = ([], [])
        """Of the running step: what decodes, and the prompts."""

    def _new_slots(self) -> SlotPool:
        config = self._config
        return SlotPool(config.slots, config.min_prefix, config.cache_tokens, config.block_tokens)

    def _reservation(self, length: int, budget: int | None) -> int:
        room = self._limits.max_model_len - length
        # the last token is never put into the cache
        offsets = length + (room if budget is None else min(room, budget)) - 1
        if self._slots.room is not None and offsets > self._slots.room:
            raise InputError(
                f"a prompt of {length} tokens and its output take {offsets} tokens; the KV cache holds "
                f"{self._slots.room}: give it more space, or request fewer tokens"
            )
        return self._slots.blocks(offsets)

    def next(self) -> ScheduledBatch | None:
        """The next step, or None if there is nothing to run."""
        self._require_complete()
        if handed := self._admit_handed():
            self._rows = handed, []
            admitted = tuple((sequence.id, 0) for sequence in handed)
            return self._hand_over(handed, self._slots.take_copies(), admitted)
        decoding = self._decoding.copy()
        room = self._most
        if decoding:
            room = min(self._config.prefill_budget, self._limits.max_num_batched_tokens - len(decoding))
        parts: list[_Part] = []
        for sequence in self._prefilling:
            room -= self._take(parts, sequence, room)
        admitted = self._admit(parts, room)
        if not parts and not decoding:
            return None
        rows = self._decode_rows(decoding, drafts=not parts)
        rows += [
            ScheduledRow(s.id, s.slot, s.cached, s.tokens[s.cached : stop], stop == s.prompt_length, 0, s.adapter)
            for s, stop in parts
        ]
        self._running = ScheduledBatch(
            "prompt" if parts else "decode", None, tuple(rows), self._slots.take_copies(), admitted,
            decode_rows=len(decoding) if parts else 0,
        )  # fmt: skip
        self._written(rows)
        self._rows = decoding, parts
        return self._running

    def complete(self, work: ScheduledBatch, tokens: Mapping[int, Sequence[int]], finished: Set[int]) -> None:
        """Report a step's results."""
        self._completed(work)
        decoding, parts = self._rows
        if work.handed:
            self._took_over(decoding, tokens, finished)
            return
        self._decoded(decoding, tokens, finished)
        for sequence, stop in parts:
            if sequence.gone:
                continue
            sequence.cached = stop
            if stop == sequence.prompt_length:
                self._prefilled(sequence, tokens, finished)

    def _take(self, parts: list[_Part], sequence: ScheduledSequence, room: int) -> int:
        """Add as much of a prompt to the step as fits; returns the number of tokens."""
        count = min(room, sequence.prompt_length - sequence.cached)
        if count:
            parts.append((sequence, sequence.cached + count))
        return count

    def _admit(self, parts: list[_Part], room: int) -> tuple[tuple[int, int], ...]:
        """Move sequences from the queue into the step while they fit; returns their ids and what a prefix saves."""
        admitted = []
        while room and len(self._prefilling) + len(self._decoding) < self._config.max_num_seqs:
            sequence = self._queue.first()
            if sequence is None or sequence.handed or not self._slots.fits(sequence):
                break
            prefix = self._prefix(sequence)
            if self._comes(sequence, 0 if prefix is None else prefix.length, parts):
                break
            self._queue.pop(frozenset())
            self._slots.admit(sequence, prefix)
            self._prefilling.append(sequence)
            room -= self._take(parts, sequence, room)
            admitted.append((sequence.id, sequence.cached))
        return tuple(admitted)

    def _admit_handed(self) -> list[ScheduledSequence]:
        """Move transferred prompts from the front of the queue to slots, as far as they fit."""
        admitted: list[ScheduledSequence] = []
        while len(self._prefilling) + len(self._decoding) < self._config.max_num_seqs:
            sequence = self._queue.first()
            if sequence is None or not sequence.handed or not self._slots.fits(sequence):
                break
            self._queue.pop(frozenset())
            self._slots.admit(sequence, None)
            self._prefilling.append(sequence)
            admitted.append(sequence)
        return admitted

    def _least(self, sequence: ScheduledSequence) -> int:
        """The shortest prefix worth sharing, in tokens; 0: none."""
        return 1 if sequence.group is not None else self._config.min_prefix

    def _prefix(self, sequence: ScheduledSequence) -> Match | None:
        """The slot that holds the longest prefix of the prompt; None if it is not worth a copy."""
        least = self._least(sequence)
        if not least or sequence.prompt_length <= least:
            return None
        match = longest_match(self._slots, sequence, within_group=not self._config.min_prefix)
        return match if match is not None and match.length >= least else None

    def _comes(self, sequence: ScheduledSequence, found: int, parts: Sequence[_Part]) -> bool:
        """Whether `parts` compute enough of the prompt's prefix, beyond `found` tokens, to wait for."""
        least = self._least(sequence)
        if not least or sequence.prompt_length - 1 < found + least:
            return False
        prompt = np.frombuffer(sequence.tokens, np.int64, sequence.prompt_length)
        for other, stop in parts:
            if other.adapter != sequence.adapter or (not self._config.min_prefix and other.group != sequence.group):
                continue
            common = common_prefix(prompt, other.tokens, min(stop, sequence.prompt_length - 1))
            if common >= max(found + least, other.floor, self._config.rewind.floor(stop)):
                return True
        return False

    def _decode_rows(self, decoding: Sequence[ScheduledSequence], drafts: bool) -> list[ScheduledRow]:
        rows = []
        room = self._limits.max_num_batched_tokens - len(decoding)
        for s in decoding:
            if s.cached > self._limits.longest_past:
                raise RuntimeError(f"a sequence with {s.cached} cached tokens was not finished at max_model_len")
            guessed: Sequence[int] = ()
            if drafts and self._drafter is not None and room:
                guessed = self._drafter(s.id, s.tokens, self._draftable(room))
                room -= len(guessed)
            rows.append(ScheduledRow(s.id, s.slot, s.cached, (s.tokens[-1], *guessed), True, len(guessed), s.adapter))
        return rows
