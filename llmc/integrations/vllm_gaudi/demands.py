"""The steps of traffic: prompts in the runner's groups, decodes of all running sequences, both in blocks.

Rules of vllm_gaudi/v1/worker/hpu_model_runner.py (_extract_prefill_batch_contents, _can_merge_prefill_contents,
_create_decode_input_data, get_habana_paged_attn_buffers), August 2026. The cost of contiguous paged attention depends
on the highest block that a step reads (`SimulatedBlocks`).

vLLM V1 allocates blocks from a queue (vllm/v1/core/block_pool.py): block 0 is never used, a request takes the first of
the queue, and its freed blocks go to the end, its last block first. Ids therefore walk through the whole cache. The
plug-in's defragmenter (vllm_gaudi/extension/defragmentation.py, on by default with contiguous PA) maps them to slots.
It runs before a step whose highest used slot is above the number of used ones plus VLLM_DEFRAG_THRESHOLD, and moves the
highest ones, at most 512, to the lowest free slots.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.traffic.chunked_schedule import Chunk, MixedSteps
from llmc.integrations.base import GraphDemand, Shape, spaced
from llmc.integrations.vllm_gaudi.config import DECODE, PROMPT, GaudiView
from llmc.integrations.vllm_gaudi.proposal import work

MOST_MOVES = 512
"""Most blocks that one pass of the defragmenter moves."""


class SimulatedBlocks:
    """The blocks of the requests of a simulated server.

    Nothing is cached beyond a request, and none is preempted: a request that finds the cache full takes a block beyond
    it.
    """

    def __init__(self, view: GaudiView) -> None:
        self._block = view.block
        self._threshold = view.number("defrag_threshold") if view.defrag else None
        self._fresh, self._size = 1, view.pool
        self._queue: deque[int] = deque()
        self._held: dict[int, list[int]] = {}
        self._index: dict[int, int] = {}
        self._id_at: dict[int, int] = {}
        self._used: set[int] = set()
        self._high: list[int] = []
        self._low: list[int] = []
        self._reach = 1

    def take(self, step: MixedSteps) -> Iterator[tuple[int, int, int]]:
        """Yield (decoding sequences, highest slot + 1, steps) of the decode steps of `step`, in order."""
        for number in step.finished:
            self._free(number)
        for chunk in step.chunks:
            self._grow(chunk.request, chunk.past + chunk.new)
        numbers = step.requests.tolist()
        filled = step.cached % self._block
        for index in np.flatnonzero(filled == 0).tolist():
            self._grow(numbers[index], int(step.cached[index]) + 1)
        self._defragment()
        if not numbers:
            return
        first = self._block - filled
        turns: dict[int, list[int]] = {}
        for index in np.flatnonzero(first < step.steps).tolist():
            for turn in range(int(first[index]), step.steps, self._block):
                turns.setdefault(turn, []).append(numbers[index])
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
        self._use(self._index.get(block, block))

    def _use(self, index: int) -> None:
        self._used.add(index)
        heappush(self._high, -index)
        while self._reach <= index:
            heappush(self._low, self._reach)
            self._reach += 1

    def _free(self, number: int) -> None:
        for block in reversed(self._held.pop(number)):
            self._queue.append(block)
            index = self._index.get(block, block)
            self._used.remove(index)
            heappush(self._low, index)

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
            self._index[moved], self._index[other] = target, source
            self._id_at[target], self._id_at[source] = moved, other
            self._used.remove(source)
            self._use(target)
            heappush(self._low, source)
        if len(self._low) > 4 * self._reach:
            self._low = [index for index in range(1, self._reach) if index not in self._used]
            heapify(self._low)


Ints = NDArray[np.int64]


def count(view: GaudiView, steps: Iterable[MixedSteps]) -> Iterator[GraphDemand]:
    """Yield the demands of `steps`, each shape once; memory grows with distinct shapes.

    A prefill is (sequences, longest query, longest context in blocks). Sequences without context run together, in
    order, at most VLLM_PROMPT_BS_BUCKET_MAX of them and while sequences · longest query stay within
    max_num_batched_tokens (the runner checks the padded numbers). One with context runs separately; merged prefill runs
    all as one sequence. A decode step is (sequences, 1, blocks): the blocks of all sequences, each with room for the
    new token, or with contiguous PA the highest block id + 1. k drafts give k + 1 rows per sequence, each with all its
    blocks.
    """
    prompts: Counter[Shape] = Counter()
    real: Counter[Shape] = Counter()
    decodes = _Decodes()
    pool = SimulatedBlocks(view) if view.contiguous else None
    for step in steps:
        for group in groups(view, step.chunks):
            contexts = [-(-chunk.past // view.block) for chunk in group]
            news = [chunk.new for chunk in group]
            shape: Shape = (1, sum(news), sum(contexts)) if view.merged else (len(group), max(news), max(contexts))
            prompts[shape] += 1
            real[shape] += sum(news) + sum(contexts)
        if pool is not None:
            for batch, highest, number in pool.take(step):
                decodes.add(batch, highest, np.array([number]))
        elif len(step.cached):
            decodes.add(len(step.cached), *blocks(step.cached, step.steps, view.block))
    for shape, number in prompts.items():
        yield GraphDemand(PROMPT, shape, number, real[shape])
    rows = 1 + view.drafts
    for batch, context, number in decodes.counted():
        needed = context if view.contiguous else context * rows
        yield GraphDemand(DECODE, (batch * rows, 1, needed), number, number * (batch * rows + needed))


MOST_BATCHES, MOST_LENGTHS, MOST_CONTEXTS = 64, 64, 64
"""Most batches, prompt lengths and contexts of uniform steps."""


def uniform(view: GaudiView, most_blocks: int) -> Iterator[GraphDemand]:
    """Yield uniform steps: every batch and prompt length equally often, and with each every number of blocks that it
    can have; a decode step has at most `most_blocks`.
    """
    rows = 1 + view.drafts
    for batch in spaced(view.seqs, MOST_BATCHES):
        least = 1 if view.contiguous else batch
        top = most_blocks if view.contiguous else min(batch * view.blocks_each, most_blocks // rows)
        contexts = [least - 1 + number for number in spaced(top - least + 1, MOST_CONTEXTS)]
        for context in contexts:
            needed = context if view.contiguous else context * rows
            yield _once(DECODE, (batch * rows, 1, needed), len(contexts))
    for batch in range(1, min(view.prefill, view.seqs) + 1):
        for query in spaced(min(view.longest_prompt, view.tokens // batch), MOST_LENGTHS):
            contexts = [0]
            if batch == 1:
                contexts += spaced(-(-(view.longest_prompt - query) // view.block), MOST_CONTEXTS)
            for context in contexts:
                yield _once(PROMPT, (batch, query, context), len(contexts))


def _once(family: str, shape: Shape, of: int) -> GraphDemand:
    """A step of `shape` as one of `of` that together count as often as those of another batch or length."""
    steps = -(-MOST_CONTEXTS // of)
    return GraphDemand(family, shape, steps, steps * work(family, shape))


def groups(view: GaudiView, chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Yield the chunks that run together, in their order."""
    group: list[Chunk] = []
    for chunk in chunks:
        rows = len(group) + 1
        fits = rows <= view.prefill and rows * max([chunk.new, *(c.new for c in group)]) <= view.tokens
        if group and not view.merged and (chunk.past or group[0].past or not fits):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def blocks(cached: Ints, steps: int, block: int) -> tuple[int, Ints]:
    """Return blocks of all sequences in each of `steps` steps, in which every sequence grows by a token.

    The result is (least, numbers of steps with least, least + 1, … blocks).
    """
    least = int((cached // block + 1).sum())
    if steps == 1:
        return least, np.ones(1, np.int64)
    starts = block - cached % block
    grown = np.concatenate([starts + block * turn for turn in range(-(-steps // block))])
    added = np.bincount(grown[grown < steps], minlength=steps)
    return least, np.bincount(np.cumsum(added))


class _Decodes:
    def __init__(self) -> None:
        self._rows: dict[int, Ints] = {}

    def add(self, batch: int, least: int, steps: Ints) -> None:
        """Add steps[i] steps of `batch` sequences with least + i blocks."""
        end = least + len(steps)
        row = self._rows.get(batch)
        if row is None or len(row) < end:
            grown = np.zeros(2 * end, np.int64)
            if row is not None:
                grown[: len(row)] = row
            row = self._rows[batch] = grown
        row[least:end] += steps

    def counted(self) -> Iterator[tuple[int, int, int]]:
        """(sequences, blocks, steps), ascending."""
        for batch in sorted(self._rows):
            row = self._rows[batch]
            for context in np.flatnonzero(row).tolist():
                yield batch, context, int(row[context])
