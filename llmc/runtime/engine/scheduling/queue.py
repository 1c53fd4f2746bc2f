"""A sequence as the scheduler keeps it, and the queue in which it waits for a slot."""

from __future__ import annotations

from array import array
from collections.abc import Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

Span = tuple[int, int]
"""Half-open range of a sequence's tokens, (start, stop)."""


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """`tokens` are the prompt and the output so far; slot `slot` holds the first `cached` of them (−1: no slot yet).

    `rank` and `arrival` order the queue, lowest first. `gone`: finished or cancelled. `spans`: the prompt's spans left
    to compute with buckets up to `cap`, last first; empty: to be computed again. `reserved`: shared-pool tokens
    reserved for it. `handed`: another executor computed its prompt. `floor`: the lowest start other than 0 in its slot
    after the running step. `adapter`: the bundle's adapter number, 0 for none.
    """

    id: int
    tokens: array[int]
    prompt_length: int
    arrival: int
    rank: int
    group: int | None = None
    slot: int = -1
    cached: int = 0
    gone: bool = False
    cap: int = -1
    spans: list[Span] = field(default_factory=list)
    reserved: int = 0
    handed: bool = False
    floor: int = 0
    adapter: int = 0


_Entry = tuple[int, int, ScheduledSequence]


class WaitingQueue:
    """A heap by rank, then arrival. The rank is arrival number + overtake · priority.

    A sequence that arrives more than overtake · (priority difference) later never goes first, so none starves.
    Sequences of a blocked group step aside until `release`, without delaying those behind them.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._aside: dict[int, list[_Entry]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence. O(log n)."""
        heappush(self._heap, (sequence.rank, sequence.arrival, sequence))
        self._count += 1

    def discard(self, sequence: ScheduledSequence) -> None:
        """Remove a waiting sequence that the caller has marked as gone; amortised O(1)."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + 16:
            self._heap = [entry for entry in self._heap if not entry[2].gone]
            heapify(self._heap)

    def first(self) -> ScheduledSequence | None:
        """The first sequence, without removing it, or None."""
        while self._heap and self._heap[0][2].gone:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self, blocked: Set[int]) -> ScheduledSequence | None:
        """Remove and return the first sequence whose group is not in `blocked`, or None."""
        while self._heap:
            entry = heappop(self._heap)
            sequence = entry[2]
            if sequence.gone:
                continue
            if sequence.group is not None and sequence.group in blocked:
                self._aside.setdefault(sequence.group, []).append(entry)
                continue
            self._count -= 1
            return sequence
        return None

    def release(self, group: int) -> None:
        """Requeue the sequences of `group`, which is no longer blocked."""
        for entry in self._aside.pop(group, ()):
            heappush(self._heap, entry)
