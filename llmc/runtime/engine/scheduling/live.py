"""The sequences that a scheduler knows, as they come and go: what both schedulers do alike."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from llmc.buckets.coverage import prove
from llmc.errors import ArtifactError, InputError
from llmc.runtime.engine.scheduling.base import Copy, Occupancy, Row, ScheduledBatch, SchedulerConfig, StepScheduler
from llmc.runtime.engine.scheduling.prefixes import common_prefix
from llmc.runtime.engine.scheduling.queue import WaitingQueue
from llmc.runtime.engine.scheduling.sequence import ScheduledSequence

if TYPE_CHECKING:
    from llmc.buckets.limits import Limits
    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.scheduling.base import SchedulerConfig
    from llmc.runtime.engine.scheduling.pool import SlotPool
    from llmc.runtime.engine.scheduling.slots import SlotTable

S = TypeVar("S", "SlotTable", "SlotPool")


class LiveSequences(StepScheduler, Generic[S]):
    """Sequences in the queue, in prefill and decoding, in the slots of `_new_slots`.

    Raises InputError and ArtifactError as `check_config` does.
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
        self._slots: S = self._new_slots()
        self._prefilling: list[ScheduledSequence] = []
        """Whose turn it is comes first."""
        self._decoding: list[ScheduledSequence] = []
        self._running: ScheduledBatch | None = None

    @abstractmethod
    def _new_slots(self) -> S:
        """Slots of which nothing is known."""

    def _add(
        self, sequence: int, prompt: Sequence[int], priority: int, group: int | None, reserved: int = 0,
        handed: bool = False, adapter: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence that `_check_new` admitted."""
        self._arrivals += 1
        rank = self._arrivals + self._config.overtake * priority
        added = ScheduledSequence(
            sequence, array("q", prompt), len(prompt), self._arrivals, rank, group, reserved=reserved, handed=handed,
            adapter=adapter,
        )  # fmt: skip
        self._known[sequence] = added
        self._queue.push(added)

    def _check_new(self, sequence: int, prompt: Sequence[int]) -> None:
        """Raise InputError for an id that is taken, and for a prompt that the plan does not admit."""
        if sequence in self._known:
            raise InputError(f"sequence {sequence} is queued or running already; give each sequence an id of its own")
        check_prompt(self._limits, prompt)

    def cancel(self, sequence: int) -> None:
        """Forget a sequence; see StepScheduler."""
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
        """Forget a sequence and all cached tokens with the same beginning; see StepScheduler."""
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
        """Forget all sequences and all that slots hold; see StepScheduler."""
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
        rows = tuple(Row(s.id, s.slot, 0, s.tokens[: s.prompt_length], True, 0, s.adapter) for s in sequences)
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

    def _written(self, rows: Sequence[Row]) -> None:
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
            made = tokens[sequence.id]
            sequence.tokens.extend(made)
            sequence.cached += len(made)
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


def check_prompt(limits: Limits, prompt: Sequence[int]) -> None:
    """Raise InputError for a prompt that is empty or longer than the plan admits, naming the limit."""
    length = len(prompt)
    if not 1 <= length <= limits.longest_prompt:
        name = "max_model_len - 1" if limits.max_prompt_len is None else "max_prompt_len"
        raise InputError(f"the prompt has {length} tokens; {name} allows 1 to {limits.longest_prompt}")
