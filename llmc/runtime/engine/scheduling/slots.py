"""The contents of each cache slot, the search for cached prefixes, and the copies between slots.

A slot belongs to a live sequence, retains an ended sequence's tokens, or is free. Every change takes effect here at
once and is recorded as a copy; `take_copies` returns copies in an order in which each source is still intact. Retained
tokens are evicted, least recently used first, when a new sequence needs their room or slot.
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

    With a shared token pool, both may be the same slot, which is then cut to `length` tokens.
    """

    source: int
    target: int
    length: int


@dataclass(slots=True, eq=False)
class Retained:
    """The first `length` of `tokens`, kept in a slot after their sequence ended.

    `used` orders by last use; `floor` is the lowest start of a step other than 0; `adapter` is what computed them.
    """

    tokens: array[int]
    length: int
    used: int
    floor: int = 0
    adapter: int = 0

    @classmethod
    def of(cls, sequence: ScheduledSequence, used: int) -> Retained:
        """Create from a sequence that ended."""
        return cls(sequence.tokens, sequence.cached, used, sequence.floor, sequence.adapter)


class CacheSlots:
    """`count` slots; an ended sequence's tokens are retained if at least `least_retained` (0: never)."""

    def __init__(self, count: int, least_retained: int) -> None:
        self.live: list[ScheduledSequence | None] = [None] * count
        self.retained: list[Retained | None] = [None] * count
        self._least = least_retained
        self._copies: list[Copy] = []
        self._clock = 0

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies since the last call, in the order in which they must run."""
        if not self._copies:
            return ()
        copies, self._copies = tuple(self._copies), []
        return copies

    def retire(self, sequence: ScheduledSequence) -> bool:
        """Free the slot of an ended sequence or retain its tokens; returns whether they are retained."""
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
    """How many of the first `limit` tokens are equal; both must have at least `limit`. Takes a few microseconds."""
    if limit < 1 or held[0] != prompt[0]:
        return 0
    # an array cannot be extended while a view of it lives, so no view may leave this function
    different: NDArray[np.bool_] = prompt[:limit] != np.frombuffer(held, np.int64, limit)
    first = int(different.argmax())
    return first if different[first] else limit


class Match(NamedTuple):
    """A prompt begins with the first `length` tokens of a slot. A step may start after them, and from `floor` on."""

    slot: int
    length: int
    floor: int


def longest_match(slots: CacheSlots, sequence: ScheduledSequence, within_group: bool) -> Match | None:
    """The longest prefix of a prompt, at most all but one token, that a slot holds and a step may start after.

    None if there is none. Only tokens computed with the sequence's own adapter count. Retained tokens win over equally
    long ones of live sequences, and low slots over high ones. `within_group`: only live sequences of the same group
    count.
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
    """The first `length` cached tokens of `slot` serve a new prompt. `floor` is the slot's.

    `whole`: the slot retains no further token.
    """

    slot: int
    length: int
    whole: bool
    floor: int = 0


class SlotTable(CacheSlots):
    """Slots of which decode graphs take the first n: `arrange` keeps decoding sequences there.

    This costs copies, which are kept few: sequences move only before a decode step or an admission, at most once each,
    and a new sequence gets the lowest slot without a live one, in which it is likely to decode. Retained tokens are
    moved out of the way while some slot holds nothing newer, because recomputing a token costs hundreds of times as
    much as copying it.
    """

    def admit(self, sequence: ScheduledSequence, prefix: Prefix | None) -> None:
        """Give `sequence` a slot that holds `prefix`, if there is one.

        At least one slot must have no live sequence, and decoding sequences must be arranged (`arrange`).
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
        """Those of `decoding` that `arrange` can move to the first slots, by slot.

        These are all, if some slot has no live sequence. Otherwise a started prompt may block a sequence in a higher
        slot, which waits for it.
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
        """Move the placeable sequences of `decoding` to slots 0 … n − 1 and return them in that order.

        Each moves with one copy. What is in its way is moved out first, retained tokens only if there is a better slot
        for them.
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
        """Move `mover` to slot `hole`, and the contents of `hole` to a slot from `floor` on."""
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
        if self.retained[slot] is not None:
            self._save(slot, floor)
            self.retained[slot] = None

    def _save(self, slot: int, floor: int) -> None:
        """Copy what `slot` retains to the highest free slot from `floor` on, or over the oldest older tokens."""
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
    """Slots that sequences stay in. With `cache_tokens`, they share that many tokens in blocks of `block_tokens`.

    Slots are then cut and emptied by copies as early as possible. Each slot counts with its tokens rounded up to whole
    blocks, even if it shares blocks: a live slot with its sequence's reservation, a retaining slot with the retained
    tokens. The sum never exceeds the pool, so an admitted sequence never lacks room or is preempted. Initial contents
    are unknown, so the first copies empty the slots.
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
        """The longest sequence that fits the pool on its own, in tokens; None: any fits."""
        return None if self._tokens is None else self._tokens // self._block * self._block

    def blocks(self, tokens: int) -> int:
        """`tokens` rounded up to whole blocks, in tokens."""
        return -(-tokens // self._block) * self._block

    def fits(self, sequence: ScheduledSequence) -> bool:
        """Whether the pool has room for the sequence's reservation, if all retained tokens are dropped."""
        return self._tokens is None or self._reserved() + sequence.reserved <= self._tokens

    def admit(self, sequence: ScheduledSequence, prefix: Match | None) -> None:
        """Give `sequence`, which must fit, a slot; with `prefix`, a slot that holds it.

        At least one slot must have no live sequence. Retained tokens are taken over in their slot if nothing else of
        them would remain or there is no room for a copy.
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
        """Free the slot of an ended sequence or retain its tokens, and return the rest to the pool."""
        keeps = super().retire(sequence)
        self._cut(sequence.slot, sequence.cached if keeps else 0)
        return keeps

    def _reserved(self) -> int:
        return sum(held.reserved for held in self.live if held is not None)

    def _held(self) -> int:
        return self._reserved() + sum(self.blocks(kept.length) for kept in self.retained if kept is not None)

    def _room_beside(self, kept: Retained, slot: int, sequence: ScheduledSequence) -> bool:
        """Whether `sequence` has a slot other than `slot`, and room in addition to what that one retains."""
        if all(held is not None for other, held in enumerate(self.live) if other != slot):
            return False
        return self._tokens is None or self._reserved() + self.blocks(kept.length) + sequence.reserved <= self._tokens

    def _vacant(self, source: int) -> int:
        """The lowest free slot, otherwise the one with the oldest retained tokens, except `source`."""
        ranked = [
            (-1 if kept is None else kept.used, slot)
            for slot, (held, kept) in enumerate(zip(self.live, self.retained, strict=True))
            if held is None and slot != source
        ]
        return min(ranked)[1]

    def _make_room(self, source: int) -> None:
        """Drop retained tokens, oldest first, except those of `source`, until the pool holds the rest."""
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
        """Retain nothing in the slot and return its tokens to the pool."""
        super().drop(slot)
        self._cut(slot, 0)

    def _cut(self, slot: int, length: int) -> None:
        """Return the slot's tokens beyond `length`. Without a pool, the slot's next step overwrites them."""
        if self._tokens is not None:
            self._copies.append(Copy(slot, slot, length))
