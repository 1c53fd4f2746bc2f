"""Slots that sequences stay in, and the pool of tokens that they may share.

Every slot counts with its tokens rounded up to whole blocks, whatever blocks it shares with others: a live one with all
that its sequence may come to (its reservation), one that retains an ended sequence's tokens with those. The sum is
never more than the pool, so that no sequence that was admitted ever lacks room, and none has to be preempted. Retained
tokens give way, least recently used first, when a new sequence needs their room or their slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.runtime.engine.scheduling.base import Copy
from llmc.runtime.engine.scheduling.prefixes import Match
from llmc.runtime.engine.scheduling.slots import Retained

if TYPE_CHECKING:
    from llmc.runtime.engine.scheduling.base import SchedulerConfig
    from llmc.runtime.engine.scheduling.sequence import ScheduledSequence


class SlotPool:
    """The slots of `config`; with `cache_tokens`, what they hold is cut and emptied by copies as soon as it may be.

    Nothing is known of what slots hold before, so that the first copies empty them.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.live: list[ScheduledSequence | None] = [None] * config.slots
        self.retained: list[Retained | None] = [None] * config.slots
        self._least = config.min_prefix
        self._block = config.block_tokens
        self._tokens = config.cache_tokens
        self._copies = [] if self._tokens is None else [Copy(slot, slot, 0) for slot in range(config.slots)]
        self._clock = 0

    @property
    def room(self) -> int | None:
        """Tokens of the longest sequence that fits the pool alone; None: any fits."""
        return None if self._tokens is None else self._tokens // self._block * self._block

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies since the last call, in the order in which they have to run."""
        if not self._copies:
            return ()
        copies, self._copies = tuple(self._copies), []
        return copies

    def blocks(self, tokens: int) -> int:
        """`tokens` rounded up to whole blocks, in tokens."""
        return -(-tokens // self._block) * self._block

    def fits(self, sequence: ScheduledSequence) -> bool:
        """Whether the pool has room for the sequence's reservation, once nothing is retained any more."""
        return self._tokens is None or self._reserved() + sequence.reserved <= self._tokens

    def admit(self, sequence: ScheduledSequence, prefix: Match | None) -> None:
        """Give `sequence`, which fits, a slot; with `prefix`, one that holds that much of that slot.

        At least one slot must have no live sequence. Retained tokens of which nothing else would be left, or beside
        which there is no room, are taken over where they are.
        """
        source, length, floor = prefix or (-1, 0, 0)
        kept = self.retained[source] if prefix else None
        if kept is not None:
            kept.used = self._tick()
        if kept is not None and (kept.length == length or not self._room_beside(kept, source, sequence)):
            target = source
            self.retained[target] = None
            if kept.length > length:
                self._cut(target, length)
        else:
            target = self._vacant(source)
            if self.retained[target] is not None:
                self.drop(target)
        self.live[target] = sequence
        self._make_room(source)
        if source not in (-1, target):
            self._copies.append(Copy(source, target, length))
        sequence.slot = target
        sequence.cached = length
        sequence.floor = floor

    def retire(self, sequence: ScheduledSequence) -> None:
        """`sequence` ended: its slot retains what it cached, or is free."""
        slot = sequence.slot
        self.live[slot] = None
        keeps = bool(self._least) and sequence.cached >= max(self._least, sequence.floor)
        if keeps:
            self.retained[slot] = Retained.of(sequence, self._tick())
        self._cut(slot, sequence.cached if keeps else 0)

    def _reserved(self) -> int:
        return sum(held.reserved for held in self.live if held is not None)

    def _held(self) -> int:
        return self._reserved() + sum(self.blocks(kept.length) for kept in self.retained if kept is not None)

    def _room_beside(self, kept: Retained, slot: int, sequence: ScheduledSequence) -> bool:
        """Whether `sequence` has a slot other than `slot`, and room beside what that one retains."""
        if all(held is not None for other, held in enumerate(self.live) if other != slot):
            return False
        return self._tokens is None or self._reserved() + self.blocks(kept.length) + sequence.reserved <= self._tokens

    def _vacant(self, source: int) -> int:
        """The lowest free slot, or else the one with the oldest retained tokens, but for `source`."""
        ranked = [
            (-1 if kept is None else kept.used, slot)
            for slot, (held, kept) in enumerate(zip(self.live, self.retained, strict=True))
            if held is None and slot != source
        ]
        return min(ranked)[1]

    def _make_room(self, source: int) -> None:
        """Drop retained tokens, the oldest first, until the pool holds all; those of `source` stay."""
        if self._tokens is None:
            return
        excess = self._held() - self._tokens
        ranked = sorted((kept.used, slot) for slot, kept in enumerate(self.retained) if kept and slot != source)
        for _, slot in ranked:
            if excess <= 0:
                return
            kept = self.retained[slot]
            if kept is not None:
                excess -= self.blocks(kept.length)
                self.drop(slot)

    def drop(self, slot: int) -> None:
        """Retain nothing in the slot."""
        self.retained[slot] = None
        self._cut(slot, 0)

    def _cut(self, slot: int, length: int) -> None:
        """Give back what the slot holds beyond `length`; where there is no pool, the next step there does."""
        if self._tokens is not None:
            self._copies.append(Copy(slot, slot, length))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
