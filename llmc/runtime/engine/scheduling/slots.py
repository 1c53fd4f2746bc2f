"""What each cache slot holds, and the copies that keep decoding sequences in the first slots.

A slot is held by a live sequence, or keeps the tokens of one that ended (retained), or is free. Every change is made
here at once and noted as a copy, so that `take_copies` gives them in an order in which each source is still intact.

Copies are the price of decoding over slots 0 … n − 1 only, and are kept few: sequences move only before a decode step
or an admission, each at most once, and a new sequence gets the lowest slot that no live one holds, in which it is
likely to decode. Retained tokens are moved out of the way as long as a slot has nothing newer, since recomputing a
token costs hundreds of times as much as copying it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from llmc.runtime.engine.scheduling.base import Copy
from llmc.runtime.engine.scheduling.sequence import ScheduledSequence


@dataclass(slots=True, eq=False)
class Retained:
    """The first `length` of `tokens`, kept in a slot after their sequence ended; `used` orders by last use, and `floor`
    is the first place but 0 where a step may start. `adapter`: what they were computed with."""

    tokens: array[int]
    length: int
    used: int
    floor: int = 0
    adapter: int = 0

    @classmethod
    def of(cls, sequence: ScheduledSequence, used: int) -> Retained:
        """What a sequence that ended leaves in its slot."""
        return cls(sequence.tokens, sequence.cached, used, sequence.floor, sequence.adapter)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `length` cached tokens of `slot` serve a new prompt; `whole`: the slot retains no token beyond those
    that the prompt begins with. `floor`: that of the slot."""

    slot: int
    length: int
    whole: bool
    floor: int = 0


class SlotTable:
    """`count` slots; tokens of ended sequences are retained when they are at least `least_retained` (0: never)."""

    def __init__(self, count: int, least_retained: int) -> None:
        self.live: list[ScheduledSequence | None] = [None] * count
        self.retained: list[Retained | None] = [None] * count
        self._least = least_retained
        self._copies: list[Copy] = []
        self._clock = 0

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies since the last call, in the order in which they have to run."""
        if not self._copies:
            return ()
        copies, self._copies = tuple(self._copies), []
        return copies

    def admit(self, sequence: ScheduledSequence, prefix: Prefix | None) -> None:
        """Give `sequence` a slot that holds `prefix`, if there is one.

        At least one slot must have no live sequence, and every decoding one must be in its place (`arrange`).
        """
        target = next(slot for slot, held in enumerate(self.live) if held is None)
        source = None if prefix is None else self.retained[prefix.slot]
        if source is not None:
            source.used = self._tick()
        if prefix is not None and prefix.slot == target:
            if not prefix.whole:
                self._save(target, target + 1)
            self.retained[target] = None
        else:
            self._clear(target, target + 1)
            if prefix is not None:
                self._copies.append(Copy(prefix.slot, target, prefix.length))
                if prefix.whole and source is not None:
                    self.retained[prefix.slot] = None
        self.live[target] = sequence
        sequence.slot = target
        sequence.cached = 0 if prefix is None else prefix.length
        sequence.floor = 0 if prefix is None else prefix.floor

    def retire(self, sequence: ScheduledSequence) -> None:
        """`sequence` ended: its slot retains what it cached, or is free."""
        self.live[sequence.slot] = None
        if self._least and sequence.cached >= max(self._least, sequence.floor):
            self.retained[sequence.slot] = Retained.of(sequence, self._tick())

    def drop(self, slot: int) -> None:
        """Retain nothing in the slot."""
        self.retained[slot] = None

    def placeable(self, decoding: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Those of `decoding` that `arrange` can bring to the first slots, by slot.

        All, as long as some slot has no live sequence. When every slot is live, a started prompt may be in the way of
        one in a higher slot, which then has to wait for it.
        """
        ready = sorted(decoding, key=lambda sequence: sequence.slot)
        if None in self.live:
            return ready
        while ready:
            stuck = (self.live[slot] for slot in range(len(ready)))
            members = set(ready)
            if not any(held is not None and held not in members and held.cached for held in stuck):
                break
            ready.pop()
        return ready

    def arrange(self, decoding: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Bring those of `decoding` that can be to slots 0 … n − 1, and return them in that order.

        Each that has to move is copied once; what is in its way is moved out first, retained tokens only if there is
        a better place for them.
        """
        ready = self.placeable(decoding)
        count = len(ready)
        movers = [sequence for sequence in ready if sequence.slot >= count]
        if movers:
            members = set(ready)
            holes = [slot for slot in range(count) if self.live[slot] not in members]
            # holes without a live sequence first: each frees the mover's slot, and other sequences can then move there
            holes.sort(key=lambda slot: (self.live[slot] is not None, slot))
            for hole, mover in zip(holes, movers, strict=True):
                self._place(mover, hole, count)
            ready.sort(key=lambda sequence: sequence.slot)
        return ready

    def _place(self, mover: ScheduledSequence, hole: int, floor: int) -> None:
        """Move `mover` to slot `hole`, and what is there to a slot from `floor` on."""
        occupant, left = self.live[hole], mover.slot
        if occupant is None:
            self._clear(hole, floor)
        elif occupant.cached:
            self._move(occupant, self._room(floor))
        self._move(mover, hole)
        if occupant is not None and not occupant.cached:
            self.live[left] = occupant
            occupant.slot = left

    def _move(self, sequence: ScheduledSequence, target: int) -> None:
        self._copies.append(Copy(sequence.slot, target, sequence.cached))
        self.live[sequence.slot] = None
        self.live[target] = sequence
        sequence.slot = target

    def _room(self, floor: int) -> int:
        """The lowest free slot from `floor` on, or the one with the oldest retained tokens, which are dropped."""
        slot = next(self._free(floor), None)
        if slot is None:
            slot = min(self._kept(floor))[1]
            self.retained[slot] = None
        return slot

    def _clear(self, slot: int, floor: int) -> None:
        """Make `slot`, which no live sequence holds, free."""
        if self.retained[slot] is not None:
            self._save(slot, floor)
            self.retained[slot] = None

    def _save(self, slot: int, floor: int) -> None:
        """Copy what `slot` retains to the highest free slot from `floor` on, or over the oldest tokens that are older
        than it; nowhere if there are none."""
        kept = self.retained[slot]
        if kept is None:
            return
        target = max(self._free(floor), default=None)
        if target is None:
            used, target = min(self._kept(floor), default=(kept.used, slot))
            if used >= kept.used:
                return
        self._copies.append(Copy(slot, target, kept.length))
        self.retained[target] = kept

    def _free(self, floor: int) -> Iterator[int]:
        pairs = zip(range(floor, len(self.live)), self.live[floor:], self.retained[floor:], strict=True)
        return (slot for slot, live, kept in pairs if live is None and kept is None)

    def _kept(self, floor: int) -> Iterator[tuple[int, int]]:
        return ((kept.used, slot) for slot, kept in enumerate(self.retained) if kept is not None and slot >= floor)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
