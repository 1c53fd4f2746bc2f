"""What each cache slot holds, the search for a cached beginning of a prompt, and the copies between slots.

A slot is held by a live sequence, or keeps the tokens of one that ended (retained), or is free. Every change is made
here at once and noted as a copy, so that `take_copies` gives them in an order in which each source is still intact.
Retained tokens give way, least recently used first, when a new sequence needs their room or their slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.engine.scheduling.queue import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `length` cached tokens of slot `source` to slot `target`, which then holds nothing else.

    Where slots share a pool of tokens, the two may be the same slot, which is then cut to `length` tokens.
    """

    source: int
    target: int
    length: int


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


class CacheSlots:
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

    def retire(self, sequence: ScheduledSequence) -> bool:
        """`sequence` ended: its slot retains what it cached, or is free. Returns whether it retains that."""
        self.live[sequence.slot] = None
        keeps = bool(self._least) and sequence.cached >= max(self._least, sequence.floor)
        if keeps:
            self.retained[sequence.slot] = Retained.of(sequence, self._tick())
        return keeps

    def drop(self, slot: int) -> None:
        """Retain nothing in the slot."""
        self.retained[slot] = None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def common_prefix(prompt: NDArray[np.int64], held: array[int], limit: int) -> int:
    """How many of the first `limit` tokens are equal; both have at least `limit`. A few microseconds."""
    if limit < 1 or held[0] != prompt[0]:
        return 0
    # an array cannot be extended while a view of it lives, so no view may leave this function
    different: NDArray[np.bool_] = prompt[:limit] != np.frombuffer(held, np.int64, limit)
    first = int(different.argmax())
    return first if different[first] else limit


class Match(NamedTuple):
    """A prompt begins with the first `length` tokens of a slot, after which a step may start, and from `floor` on."""

    slot: int
    length: int
    floor: int


def longest_match(slots: CacheSlots, sequence: ScheduledSequence, within_group: bool) -> Match | None:
    """The longest common prefix of a prompt and a slot's cached tokens, at most all of the prompt but one token; None
    when there is none, or none after which a step may start in its slot.

    Only what was computed with the sequence's own adapter counts. Retained tokens win over equally long ones of live
    sequences, and low slots over high ones. `within_group`: only live sequences of the same group count.
    """

    def shared(held: array[int], length: int, floor: int) -> int:
        most = min(length, sequence.prompt_length - 1)
        found = common_prefix(prompt, held, most) if most >= floor else 0
        return found if found >= floor else 0

    prompt = np.frombuffer(sequence.tokens, np.int64, sequence.prompt_length)
    best, found = 0, None
    if not within_group:
        for slot, kept in enumerate(slots.retained):
            if kept is not None and kept.adapter == sequence.adapter:
                length = shared(kept.tokens, kept.length, kept.floor)
                if length > best:
                    best, found = length, Match(slot, length, kept.floor)
    for slot, live in enumerate(slots.live):
        if live is None or live.adapter != sequence.adapter:
            continue
        if not within_group or live.group == sequence.group:
            length = shared(live.tokens, live.cached, live.floor)
            if length > best:
                best, found = length, Match(slot, length, live.floor)
    return found


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `length` cached tokens of `slot` serve a new prompt; `whole`: the slot retains no token beyond those
    that the prompt begins with. `floor`: that of the slot."""

    slot: int
    length: int
    whole: bool
    floor: int = 0


class SlotTable(CacheSlots):
    """Slots of which decode graphs take the first n: `arrange` keeps decoding sequences there.

    Copies are the price of that, and are kept few: sequences move only before a decode step or an admission, each at
    most once, and a new sequence gets the lowest slot that no live one holds, in which it is likely to decode. Retained
    tokens are moved out of the way as long as a slot has nothing newer, since recomputing a token costs hundreds of
    times as much as copying it.
    """

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
                self._fill(mover, hole, count)
            ready.sort(key=lambda sequence: sequence.slot)
        return ready

    def _fill(self, mover: ScheduledSequence, hole: int, floor: int) -> None:
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


class SlotPool(CacheSlots):
    """Slots that sequences stay in; with `cache_tokens`, the pool of so many tokens that they share, in blocks of
    `block_tokens`. What slots hold is then cut and emptied by copies as soon as it may be.

    Every slot counts with its tokens rounded up to whole blocks, whatever blocks it shares with others: a live one with
    all that its sequence may come to (its reservation), one that retains an ended sequence's tokens with those. The sum
    is never more than the pool, so that no sequence that was admitted ever lacks room, and none has to be preempted.
    Nothing is known of what slots hold before, so that the first copies empty them.
    """

    def __init__(
        self, count: int, least_retained: int, cache_tokens: int | None = None, block_tokens: int = 1
    ) -> None:  # fmt: skip
        super().__init__(count, least_retained)
        self._block = block_tokens
        self._tokens = cache_tokens
        if cache_tokens is not None:
            self._copies = [Copy(slot, slot, 0) for slot in range(count)]

    @property
    def room(self) -> int | None:
        """Tokens of the longest sequence that fits the pool alone; None: any fits."""
        return None if self._tokens is None else self._tokens // self._block * self._block

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

    def retire(self, sequence: ScheduledSequence) -> bool:
        """As CacheSlots has it; what is not retained is given back."""
        keeps = super().retire(sequence)
        self._cut(sequence.slot, sequence.cached if keeps else 0)
        return keeps

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
        """Retain nothing in the slot, and give its tokens back."""
        super().drop(slot)
        self._cut(slot, 0)

    def _cut(self, slot: int, length: int) -> None:
        """Give back what the slot holds beyond `length`; where there is no pool, the next step there does."""
        if self._tokens is not None:
            self._copies.append(Copy(slot, slot, length))
