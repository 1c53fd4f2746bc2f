"""The steps of traffic: prompts in the runner's groups, decodes of all running sequences, both in blocks.

Rules of vllm_gaudi/v1/worker/hpu_model_runner.py (_extract_prefill_batch_contents, _can_merge_prefill_contents,
_create_decode_input_data, get_habana_paged_attn_buffers), August 2026.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.servers.base import Demand, Shape
from llmc.buckets.servers.vllm_gaudi.blocks import Pool
from llmc.buckets.servers.vllm_gaudi.filters import DECODE, PROMPT
from llmc.buckets.servers.vllm_gaudi.view import View
from llmc.buckets.traffic.chunked_schedule import Chunk, MixedSteps

Ints = NDArray[np.int64]


def count(view: View, steps: Iterable[MixedSteps]) -> Iterator[Demand]:
    """The demands of `steps`, each shape once; memory grows with distinct shapes.

    A prompt step is (sequences, longest query, longest context in blocks). Sequences without context run together, in
    order, at most VLLM_PROMPT_BS_BUCKET_MAX of them and while sequences · longest query stay within
    max_num_batched_tokens (the runner asks that of the padded numbers); one with context runs alone; merged prefill
    runs all as one sequence. A decode step is (sequences, 1, blocks): the blocks of all sequences, each with room for
    the token of the step, or with contiguous PA the highest block id + 1. k drafts make k + 1 rows of each sequence,
    each with all its blocks.
    """
    prompts: Counter[Shape] = Counter()
    real: Counter[Shape] = Counter()
    decodes = _Decodes()
    pool = Pool(view) if view.contiguous else None
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
        yield Demand(PROMPT, shape, number, real[shape])
    rows = 1 + view.drafts
    for batch, context, number in decodes.counted():
        needed = context if view.contiguous else context * rows
        yield Demand(DECODE, (batch * rows, 1, needed), number, number * (batch * rows + needed))


def groups(view: View, chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """The chunks that run together, in their order."""
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
    """Blocks of all sequences in each of `steps` steps, in which every one grows by a token: (least, how many steps
    have least, least + 1, … blocks)."""
    least = int((cached // block + 1).sum())
    if steps == 1:
        return least, np.ones(1, np.int64)
    starts = block - cached % block
    grown = np.concatenate([starts + block * turn for turn in range(-(-steps // block))])
    added = np.bincount(grown[grown < steps], minlength=steps)
    return least, np.bincount(np.cumsum(added))


class _Decodes:
    """Steps by sequences and blocks."""

    def __init__(self) -> None:
        self._rows: dict[int, Ints] = {}

    def add(self, batch: int, least: int, steps: Ints) -> None:
        """steps[i] more steps of `batch` sequences with least + i blocks."""
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
