"""Sequences that wait for a slot, in the order in which they get one."""

from __future__ import annotations

from collections.abc import Set
from heapq import heapify, heappop, heappush

from llmc.runtime.engine.scheduling.sequence import ScheduledSequence

_Entry = tuple[int, int, ScheduledSequence]


class WaitingQueue:
    """A heap by rank, then arrival. The rank is arrival number + overtake · priority. So a sequence that comes later by
    more than overtake · (difference of priorities) arrivals never goes first, and no sequence starves.

    Sequences of a blocked group step aside, without holding up those behind them, until `release`.
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
        """Forget a waiting sequence, which the caller has marked as gone; amortised O(1)."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + 16:
            self._heap = [entry for entry in self._heap if not entry[2].gone]
            heapify(self._heap)

    def first(self) -> ScheduledSequence | None:
        """The first sequence, which stays; None when there is none."""
        while self._heap and self._heap[0][2].gone:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self, blocked: Set[int]) -> ScheduledSequence | None:
        """Take the first sequence whose group is not in `blocked`; None when there is none."""
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
        """Let the sequences of `group`, which is no longer blocked, take their places again."""
        for entry in self._aside.pop(group, ()):
            heappush(self._heap, entry)
