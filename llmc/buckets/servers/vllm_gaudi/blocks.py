"""The highest block of the KV cache that a step reads: what contiguous paged attention pays for.

vLLM V1 hands blocks out of a queue (vllm/v1/core/block_pool.py): block 0 is never used, a request takes the first of
the queue, and what it gives back goes to its end, its last block first. So ids walk through the whole cache. The
plug-in's defragmenter (vllm_gaudi/extension/defragmentation.py, on by default with contiguous PA) maps them to places:
before a step whose highest used place is above the number of used ones plus VLLM_DEFRAG_THRESHOLD, it moves the
highest ones, at most 512, to the lowest free places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from llmc.buckets.servers.vllm_gaudi.view import View
from llmc.buckets.traffic.chunked_schedule import MixedSteps

MOST_MOVES = 512
"""Blocks that one pass of the defragmenter moves."""


class Pool:
    """The blocks of the requests of a simulated server; nothing is cached beyond a request, and none is preempted: a
    request that finds the cache empty takes a block beyond it."""

    def __init__(self, view: View) -> None:
        self._block = view.block
        self._threshold = view.number("defrag_threshold") if view.defrag else None
        self._fresh, self._size = 1, view.pool
        self._queue: deque[int] = deque()
        self._held: dict[int, list[int]] = {}
        self._place: dict[int, int] = {}
        self._id_at: dict[int, int] = {}
        self._used: set[int] = set()
        self._high: list[int] = []
        self._low: list[int] = []
        self._reach = 1

    def take(self, step: MixedSteps) -> Iterator[tuple[int, int, int]]:
        """(decoding sequences, highest place + 1, steps) of the decode steps of `step`, in order."""
        for number in step.finished:
            self._free(number)
        for chunk in step.chunks:
            self._grow(chunk.request, chunk.past + chunk.new)
        numbers = step.requests.tolist()
        filled = step.cached % self._block
        for place in np.flatnonzero(filled == 0).tolist():
            self._grow(numbers[place], int(step.cached[place]) + 1)
        self._defragment()
        if not numbers:
            return
        first = self._block - filled
        turns: dict[int, list[int]] = {}
        for place in np.flatnonzero(first < step.steps).tolist():
            for turn in range(int(first[place]), step.steps, self._block):
                turns.setdefault(turn, []).append(numbers[place])
        last = 0
        for turn in sorted(turns):
            yield len(numbers), self._highest() + 1, turn - last
            for number in turns[turn]:
                self._add(number)
            self._defragment()
            last = turn
        yield len(numbers), self._highest() + 1, step.steps - last

    def _grow(self, number: int, tokens: int) -> None:
        held = self._held.setdefault(number, [])
        for _ in range(len(held), -(-tokens // self._block)):
            self._add(number)

    def _add(self, number: int) -> None:
        if self._fresh < self._size or not self._queue:
            block = self._fresh
            self._fresh += 1
        else:
            block = self._queue.popleft()
        self._held[number].append(block)
        self._use(self._place.get(block, block))

    def _use(self, place: int) -> None:
        self._used.add(place)
        heappush(self._high, -place)
        while self._reach <= place:
            heappush(self._low, self._reach)
            self._reach += 1

    def _free(self, number: int) -> None:
        for block in reversed(self._held.pop(number)):
            self._queue.append(block)
            place = self._place.get(block, block)
            self._used.remove(place)
            heappush(self._low, place)

    def _highest(self) -> int:
        while self._high and -self._high[0] not in self._used:
            heappop(self._high)
        return -self._high[0] if self._high else 0

    def _lowest_free(self) -> int:
        while self._low and self._low[0] in self._used:
            heappop(self._low)
        return self._low[0] if self._low else self._reach

    def _defragment(self) -> None:
        if self._threshold is None or self._highest() - self._threshold <= len(self._used):
            return
        for _ in range(MOST_MOVES):
            source, target = self._highest(), self._lowest_free()
            if target > source:
                break
            moved, other = self._id_at.get(source, source), self._id_at.get(target, target)
            self._place[moved], self._place[other] = target, source
            self._id_at[target], self._id_at[source] = moved, other
            self._used.remove(source)
            self._use(target)
            heappush(self._low, source)
        if len(self._low) > 4 * self._reach:
            self._low = [place for place in range(1, self._reach) if place not in self._used]
            heapify(self._low)
