"""Padding-aware strategy: linear steps, without the values that save too little padding.

Rule and defaults follow the Gaudi bucketing guide. Two bounds limit the padding of a request: an absolute one (pad_max)
and a share of the bucket (pad_percent).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.strategies.base import Dimension, Range, Strategy
from llmc.buckets.strategies.defaults import default_ranges
from llmc.errors import InputError
from llmc.settings import PARAMETERS

DEFAULT_PAD_PERCENT = 25


def values(
    min: int,  # noqa: A002 - the public spelling of the rule
    step: int,
    max: int,  # noqa: A002 - the public spelling of the rule
    pad_max: int,
    pad_percent: int,
) -> list[int]:
    """Return ascending, distinct values of the padding-aware rule, from min to max inclusive.

    Ramp-up: min doubles (0 goes to 1) until it is above step. Then a cursor continues in steps. It keeps a value if,
    without it, a request one above the last kept value would be padded by more than pad_max, or by more than
    pad_percent of its bucket. It also keeps multiples of pad_max. A pad_max of 0 means max. For example (0, 8, 64, 64,
    50) → 0 1 2 4 8 16 32 64. pad_percent 0 keeps every step, 50 is close to doubling.

    A request above the ramp-up is therefore padded by less than step, or by no more than either bound. Raises
    InputError for numbers that `Range` refuses.
    """
    bounds = Range(min, step, max, "padding-aware", pad_max=pad_max, pad_percent=pad_percent)
    step, allowed = bounds.step, pad_max or bounds.max
    found = [bounds.min]
    cursor = bounds.min
    while cursor <= bounds.max:
        last = found[-1]
        if cursor <= step:
            cursor = 2 * last or 1
            if cursor <= bounds.max:
                found.append(cursor)
            continue
        following = cursor + step
        padding = following - last - 1
        needed = 100 * padding > pad_percent * following or padding > allowed or cursor % allowed == 0
        if cursor != last and needed:
            found.append(cursor)
        cursor = following
    if found[-1] != bounds.max:
        found.append(bounds.max)
    return found


class PaddingAware(Strategy):
    """The padding-aware strategy, with the rule of `values`."""

    parameters: ClassVar[tuple[str, ...]] = tuple(name for name in PARAMETERS if name != "limit")

    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """Return the guide's ranges (`default_ranges`) with its padding bounds."""
        block = limits.block_size
        ranges = default_ranges(
            limits, prompt_batch=(1, 1), prompt_query=(block, block), prompt_context_step=2 * block,
            decode_batch=(1, 2), decode_context=(block, block),
        )  # fmt: skip
        return {dimension: self.complete(dimension, bounds, limits) for dimension, bounds in ranges.items()}

    def complete(self, dimension: Dimension, bounds: Range, limits: Limits) -> Range:
        """Return `bounds` with a pad_max of a quarter of max, rounded up, and a pad_percent of 25 where it has none."""
        return replace(
            bounds,
            pad_max=-(-bounds.max // 4) if bounds.pad_max is None else bounds.pad_max,
            pad_percent=DEFAULT_PAD_PERCENT if bounds.pad_percent is None else bounds.pad_percent,
        )

    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """Return `values` of the range; the same rule for every dimension.

        Raises InputError for a range without pad_max or pad_percent.
        """
        if bounds.pad_max is None or bounds.pad_percent is None:
            raise InputError(f"{bounds}: the padding-aware rule needs pad_max and pad_percent; give both")
        return values(bounds.min, bounds.step, bounds.max, bounds.pad_max, bounds.pad_percent)
