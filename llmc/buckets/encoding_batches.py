"""Rows of all lengths as batches: neighbours in length together, each padded to its bucket or its longest row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.buckets.encoding import EncodePlan

STEP_TOKENS = 768
"""Tokens of a batch at most, padding included, where any shape runs. Smaller ones read the weights more often, larger
ones leave caches and, at the end, processors idle. Seen on two CPUs with bge-small's shape in bf16, sentences a second,
in turns: 512: 998, 640: 1008, 768: 1101, 896: 1059, 1024: 1065."""


@dataclass(frozen=True)
class Batch:
    """`rows`, indices of what was given, run in a graph of `batch` × `tokens`."""

    rows: tuple[int, ...]
    batch: int
    tokens: int


def batches(lengths: Sequence[int], plan: EncodePlan, exact: bool) -> list[Batch]:
    """Batches that hold every row once, longest first; within the plan's limits, and its buckets unless `exact`.

    In buckets, a batch has the rows that need its length; shorter ones take places that would else be padding.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    found: list[Batch] = []
    at = 0
    while at < len(order):
        longest = lengths[order[at]]
        if exact:
            tokens = longest
            batch = min(max(1, min(plan.limits.max_num_seqs, STEP_TOKENS // longest)), len(order) - at)
        else:
            tokens = min(b.query for b in plan.buckets if b.query >= longest)
            sizes = sorted(b.batch for b in plan.buckets if b.query == tokens)
            shorter = max((b.query for b in plan.buckets if b.query < tokens), default=0)
            needing = 0
            while needing < sizes[-1] and at + needing < len(order) and lengths[order[at + needing]] > shorter:
                needing += 1
            batch = next(size for size in sizes if size >= needing)
        rows = tuple(order[at : at + batch])
        found.append(Batch(rows, batch, tokens))
        at += len(rows)
    return found
