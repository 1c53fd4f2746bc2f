"""Rows of all lengths as batches: neighbours in length together, each padded to its bucket or its longest row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.buckets.encoding import EncodePlan

STEP_TOKENS = 512
"""Tokens of a batch at most, padding included, where any shape runs: larger ones were no faster on two CPUs with
bge-small's shape in bf16, and leave processors idle at the end."""


@dataclass(frozen=True)
class Batch:
    """`rows`, indices of what was given, run in a graph of `batch` × `tokens`."""

    rows: tuple[int, ...]
    batch: int
    tokens: int


def batches(lengths: Sequence[int], plan: EncodePlan, exact: bool) -> list[Batch]:
    """Batches that hold every row once, longest first; within the plan's limits, and its buckets unless `exact`."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    found: list[Batch] = []
    at = 0
    while at < len(order):
        longest = lengths[order[at]]
        count = min(_room(plan, longest, exact), len(order) - at)
        rows = tuple(order[at : at + count])
        batch, tokens = (count, longest) if exact else _bucket(plan, count, longest)
        found.append(Batch(rows, batch, tokens))
        at += count
    return found


def _room(plan: EncodePlan, longest: int, exact: bool) -> int:
    """Rows that a batch with a longest row of so many tokens takes."""
    if exact:
        return max(1, min(plan.limits.max_num_seqs, STEP_TOKENS // longest))
    return max(b.batch for b in plan.buckets if b.query == _length(plan, longest))


def _length(plan: EncodePlan, longest: int) -> int:
    return min(b.query for b in plan.buckets if b.query >= longest)


def _bucket(plan: EncodePlan, count: int, longest: int) -> tuple[int, int]:
    length = _length(plan, longest)
    return min(b.batch for b in plan.buckets if b.query == length and b.batch >= count), length
