"""Exponential strategy: values in geometric steps from min to max, rounded up to the step.

Rule and defaults follow the Gaudi bucketing guide. It gives about log2(max) graphs per dimension, and up to half of the
work can be padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal, localcontext
from math import ceil, exp, gcd, log
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.strategies.base import Dimension, Range, Strategy
from llmc.buckets.strategies.defaults import default_ranges
from llmc.errors import InputError
from llmc.settings import BOUNDS

_NEAR = 1e-9
# A float estimate relatively this close to an integer is decided exactly; its error is far smaller.


def values(min: int, step: int, max: int, limit: int) -> list[int]:  # noqa: A002 - the public spelling of the rule
    """Return ascending, distinct values of the exponential rule; for example (128, 128, 1024, 4) → 128 256 512 1024.

    A min of 0 or 1 is a value of its own, and the rule continues with min = step. Value i, from 0 to limit − 1, is min
    · (max / min)^(i / (limit − 1)) rounded up to a multiple of step, in exact arithmetic. The last value is always max,
    since a multiple above it becomes max. A limit of 1 gives only [max]. Raises InputError for numbers that `Range`
    refuses.
    """
    bounds = Range(min, step, max, source="exponential", limit=limit)
    if limit == 1 or bounds.max == 0:
        return [bounds.max]
    step = bounds.step
    start = step if min in {0, 1} else min
    multiples = _multiples(start, step, bounds.max, limit - 1)
    found = {multiple * step for multiple in multiples if multiple * step < bounds.max}
    return sorted(found | ({min, bounds.max} if min in {0, 1} else {bounds.max}))


def _multiples(start: int, step: int, end: int, last: int) -> set[int]:
    """`_geometric` of every index from 0 to last, which is monotone: spans between equal ends are skipped."""
    known = {index: _geometric(start, step, end, index, last) for index in (0, last)}
    spans = [(0, last)]
    while spans:
        low, high = spans.pop()
        if high - low > 1 and known[low] != known[high]:
            middle = (low + high) // 2
            known[middle] = _geometric(start, step, end, middle, last)
            spans += [(low, middle), (middle, high)]
    return set(known.values())


def _geometric(start: int, step: int, end: int, index: int, last: int) -> int:
    """The least k with k · step ≥ start · (end / start)^(index / last)."""
    guess = exp(log(start) - log(step) + index / last * (log(end) - log(start)))
    nearest = round(guess)
    if nearest == 0 or abs(guess - nearest) > _NEAR * nearest:
        return ceil(guess) or 1
    common = gcd(index, last)
    reached = _reaches(nearest * step, start, end, index // common, last // common)
    return nearest if reached else nearest + 1


def _reaches(value: int, start: int, end: int, power: int, root: int) -> bool:
    """Whether value ≥ start · (end / start)^(power / root), the exponent in lowest terms; exact.

    That is value^root ≥ end^power · start^(root − power). Both sides can be equal only where end / start is 1 or the
    root-th power of another fraction, which means that end or start has more than root bits. Elsewhere logarithms
    decide, at a precision that grows until they do.
    """
    if start == end:
        return value >= start
    if root < max(start, end).bit_length():
        return bool(value**root >= end**power * start ** (root - power))
    precision = 50
    while True:
        with localcontext() as context:
            context.prec = precision
            terms = root * Decimal(value).ln(), power * Decimal(end).ln(), (root - power) * Decimal(start).ln()
            difference = terms[0] - terms[1] - terms[2]
            if abs(difference) > sum(terms) * Decimal(10) ** (3 - precision):
                return difference > 0
        precision *= 2


class Exponential(Strategy):
    """The exponential strategy, with the rule of `values`."""

    parameters: ClassVar[tuple[str, ...]] = (*BOUNDS, "limit")

    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """Return the guide's ranges (`default_ranges`) with its number of values."""
        block = limits.block_size
        ranges = default_ranges(
            limits, prompt_batch=(1, 2), prompt_query=(block, block), prompt_context_step=block, decode_batch=(1, 2),
            decode_context=(block, block),
        )  # fmt: skip
        return {dimension: self.complete(dimension, bounds, limits) for dimension, bounds in ranges.items()}

    def complete(self, dimension: Dimension, bounds: Range, limits: Limits) -> Range:
        """Return `bounds` with `default_limit` where it has no limit."""
        if bounds.limit is not None:
            return bounds
        return replace(bounds, limit=default_limit(dimension, bounds.max, limits.block_size))

    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """Return `values` of the range; the same for every dimension. Raises InputError for a range without limit."""
        if bounds.limit is None:
            raise InputError(f"{bounds}: the exponential rule needs a limit, the number of values; give one")
        return values(bounds.min, bounds.step, bounds.max, bounds.limit)


def default_limit(dimension: Dimension, most: int, block_size: int) -> int:
    """Return the guide's number of values for a dimension up to `most` (sequences or tokens); at least 1.

    ceil(log2 n) + 1, n being the sequences of a batch or the KV cache blocks of a context, and ceil(log2 n) for the n
    tokens of a query. A prompt context of one block has 2 values, 0 and the block; of none, 1.
    """
    if dimension == "prompt_query":
        return max(1, _log2_up(most))
    if dimension.endswith("_batch"):
        return _log2_up(most) + 1
    blocks = -(-most // block_size)
    return 2 if dimension == "prompt_context" and blocks == 1 else _log2_up(blocks) + 1


def _log2_up(number: int) -> int:
    """ceil(log2 number), exactly; 0 for 0 and 1."""
    return max(0, number - 1).bit_length()
