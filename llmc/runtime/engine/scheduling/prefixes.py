"""The search for a cached beginning of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.engine.scheduling.sequence import ScheduledSequence

if TYPE_CHECKING:
    from llmc.runtime.engine.scheduling.slots import Retained


class Slots(Protocol):
    """What each slot holds: a live sequence, an ended one's tokens, or nothing."""

    @property
    def live(self) -> Sequence[ScheduledSequence | None]:
        """The live sequence of each slot."""

    @property
    def retained(self) -> Sequence[Retained | None]:
        """The retained tokens of each slot."""


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


def longest_match(slots: Slots, sequence: ScheduledSequence, within_group: bool) -> Match | None:
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
