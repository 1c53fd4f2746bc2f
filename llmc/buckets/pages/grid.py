"""Buckets as a grid: how many graphs there are at each batch and length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmc.buckets.bucket import Bucket
from llmc.buckets.pages.tables import Grid

MOST = 16
"""Rows and columns of a grid; of more values neighbours share one."""

DARKEST = 0.85


def grids(prompt: Sequence[Bucket], decode: Sequence[Bucket]) -> list[Grid]:
    """A grid of prompt buckets by batch and new tokens, and one of decode buckets by batch and context."""
    return [
        _grid("Prompt graphs", prompt, "new tokens", lambda bucket: bucket.query),
        _grid("Decode graphs", decode, "context", lambda bucket: bucket.context),
    ]


def _grid(heading: str, buckets: Sequence[Bucket], across: str, length: Callable[[Bucket], int]) -> Grid:
    batches = _shared({bucket.batch for bucket in buckets})
    lengths = _shared({length(bucket) for bucket in buckets})
    numbers = [[0] * len(lengths) for _ in batches]
    rows = {value: place for place, values in enumerate(batches) for value in values}
    columns = {value: place for place, values in enumerate(lengths) for value in values}
    for bucket in buckets:
        numbers[rows[bucket.batch]][columns[length(bucket)]] += 1
    most = (batches[-1][-1] * max(1, lengths[-1][-1])) ** 0.5
    shades = [[DARKEST * (some[-1] * max(1, long[-1])) ** 0.5 / most for long in lengths] for some in batches]
    return Grid(
        f"{heading} ({len(buckets):,})", f"batch \\ {across}", _names(lengths), _names(batches), numbers, shades,
        "How many graphs; darker: more tokens in a step.",
    )  # fmt: skip


def _shared(values: set[int]) -> list[list[int]]:
    """`values` ascending, in at most MOST groups of neighbours."""
    ordered = sorted(values)
    width = -(-len(ordered) // MOST)
    return [ordered[start : start + width] for start in range(0, len(ordered), width)]


def _names(groups: Sequence[Sequence[int]]) -> list[str]:
    return [f"{group[0]:,}" if len(group) == 1 else f"{group[0]:,}–{group[-1]:,}" for group in groups]
