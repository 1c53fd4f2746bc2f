"""The bucket of a step, and the one that a miss adds.

Rules of vllm_gaudi/extension/bucketing/common.py (find_prompt_bucket, find_decode_bucket, generate_fallback_bucket,
calc_fallback_value), August 2026: as summed up at commit 091bbad.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby

from llmc.integrations.base import Found, Shape
from llmc.integrations.vllm_gaudi.config import PROMPT, View

BATCH_STEP, QUERY_STEP, BLOCKS_STEP = 2, 32, 32


def fallback_value(number: int, step: int) -> int:
    """`number` rounded up to a multiple of ceil(∛number) · step; 0 and 1 stay."""
    if number <= 1:
        return number
    unit = math.ceil(math.pow(number, 1 / 3)) * step
    return -(-number // unit) * unit


Rows = list[tuple[int, list[tuple[int, list[int]]]]]
"""Buckets by batch, query and context, each ascending."""


def _rows(shapes: set[Shape]) -> Rows:
    return [
        (batch, [(query, [c for _, _, c in same]) for query, same in groupby(row, lambda shape: shape[1])])
        for batch, row in groupby(sorted(shapes), lambda shape: shape[0])
    ]


class Lookup:
    """The buckets of one family while the server runs.

    The first bucket in sort order that covers all three numbers is taken, not the cheapest. Where none does, a bucket
    is added and compiled in traffic: each number by `fallback_value`, the batch at most max_num_seqs, the query at
    most max_num_batched_tokens, a prompt's context at most what max_model_len needs, and a decode's at most the
    largest one prepared at start; a decode that needs more than that is looked up with that many. So a found bucket
    can be smaller than the step, which then runs unpadded and is compiled by itself.
    """

    def __init__(self, view: View, family: str, shapes: Sequence[Shape]) -> None:
        self._view = view
        self._prompt = family == PROMPT
        self._shapes = set(shapes)
        self._rows = _rows(self._shapes)
        self._most = max((context for _, _, context in shapes), default=0)
        self._known: dict[Shape, Found] = {}

    def find(self, shape: Shape) -> Found:
        """The bucket that a step of `shape` takes."""
        found = self._known.get(shape)
        if found is None:
            found = self._find(shape)
            if found.miss is None:
                self._known[shape] = found
        return found

    def _find(self, shape: Shape) -> Found:
        batch, query, context = shape
        cut = not self._prompt and 0 < self._most < context
        if cut:
            context = self._most
        asked = (batch, query, context)
        bucket = self._first(asked)
        if bucket is not None:
            return Found(bucket, "compile" if cut else None)
        bucket = self.fallback(asked)
        if bucket not in self._shapes:
            self._shapes.add(bucket)
            self._rows = _rows(self._shapes)
            self._known.clear()
        return Found(bucket, "compile")

    def _first(self, asked: Shape) -> Shape | None:
        """The first bucket in sort order that covers `asked`."""
        batch, query, context = asked
        for rows, queries in self._rows[bisect_left(self._rows, (batch,)) :]:
            for tokens, contexts in queries[bisect_left(queries, (query,)) :]:
                place = bisect_left(contexts, context)
                if place < len(contexts):
                    return rows, tokens, contexts[place]
        return None

    def fallback(self, shape: Shape) -> Shape:
        """The bucket that is added for a step of `shape`, which none covers."""
        view = self._view
        batch, query, context = shape
        slice_size = view.number("sdpa_slice")
        if view.own["sdpa_slices"] and query >= view.number("sdpa_threshold"):
            query = -(-query // slice_size) * slice_size
        else:
            query = min(fallback_value(query, max(QUERY_STEP, view.number("mamba_chunk_size"))), view.tokens)
        most = view.most_context if self._prompt else self._most
        blocks = fallback_value(context, BLOCKS_STEP)
        if most > 0:
            blocks = min(blocks, most)
        return min(fallback_value(batch, BATCH_STEP), view.seqs), query, blocks
