"""Powers-of-two strategies with the rules of NxD Inference and tpu-inference.

The rules follow the public planners. Padding is below half of the bucket, with log2(max / min) values per dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.strategies.base import MAX_VALUES, Dimension, Range, Strategy
from llmc.buckets.strategies.defaults import default_ranges, prompt_context_blocks
from llmc.errors import InputError

MIN_LENGTH = 128
"""Shortest length that NxD Inference plans by default, in tokens; here also where contexts without a min start."""

MIN_PREFIX = 512
"""Shortest active part and shortest non-empty prefix of NxD Inference's two-dimensional prefix buckets, in tokens."""

MIN_TOKENS = 16
"""Fewest new tokens that tpu-inference plans."""

MIN_REQUESTS = 8
"""Fewest sequences of a step that tpu-inference plans."""


def values(min: int, max: int) -> list[int]:  # noqa: A002 - the public spelling of the rule
    """Return NxD Inference's values: the powers of two below max, then max; for example (128, 1000) → 128 256 512 1000.

    The first power is the largest that is not above min, so a min of 100 starts at 64; min = max gives only [max].
    Ascending and distinct. Raises InputError unless 1 ≤ min ≤ max.
    """
    _require_ordered(min, max)
    if min == max:
        return [max]
    powers = []
    power = 1 << (min.bit_length() - 1)
    while power < max:
        powers.append(power)
        power *= 2
    return [*powers, max]


def prefix_values(max: int, min: int = MIN_PREFIX) -> list[int]:  # noqa: A002 - the public spelling of the rule
    """Return NxD Inference's cached prefixes: 0, then `values` from min to max; for example 2048 → 0 512 1024 2048.

    A max of 0 gives [0], one below min [0, max]. Together with active parts from `MIN_PREFIX` tokens these are the
    two-dimensional prefix buckets, active × (0 or prefix). Raises InputError unless 0 ≤ max and 1 ≤ min.
    """
    _require("max", max, 0)
    _require("min", min, 1)
    return [0, *values(min if min < max else max, max)] if max else [0]


def token_values(min: int, max: int, gap: int = 0) -> list[int]:  # noqa: A002 - the public spelling of the rule
    """Return tpu-inference's padded token counts: min doubled up to gap, then + gap, up to the first that is max or
    more.

    A gap of 0 doubles all the way. For example (16, 200, 64) → 16 32 64 128 192 256. Ascending and distinct; the last
    may be above max. Raises InputError unless 1 ≤ min ≤ max, 0 ≤ gap and max / gap ≤ MAX_VALUES.
    """
    _require_ordered(min, max)
    _require("gap", gap, 0)
    if gap and max // gap > MAX_VALUES:
        raise InputError(
            f"powers of two: gap {gap} makes more than {MAX_VALUES} values up to {max}; "
            f"raise it to at least {max // MAX_VALUES + 1}"
        )
    found = [min]
    while found[-1] < max:
        last = found[-1]
        found.append(2 * last if gap == 0 or 2 * last <= gap else last + gap)
    return found


def request_values(max: int, min: int = MIN_REQUESTS, gap: int = 0) -> list[int]:  # noqa: A002 - as above
    """Return tpu-inference's padded request counts: min doubled, the last being max; for example 20 → 8 16 20.

    These are `token_values` cut off at max; a max below min gives [max]. Raises InputError like `token_values`.
    """
    _require("max", max, 1)
    _require("min", min, 1)
    return [*(value for value in token_values(min if min < max else max, max, gap) if value < max), max]


class PowersOfTwo(Strategy):
    """NxD Inference's strategy, with the rule of `values`."""

    parameters: ClassVar[tuple[str, ...]] = ("min", "max")

    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """Return batches from 1 and lengths from 128 tokens, up to the limits; the steps are not used.

        Prompt context is only 0 where every prompt fits in one query. Where longer ones are admitted, queries start at
        512 and contexts are 0 or at least 512: the two-dimensional prefix buckets.
        """
        seqs, length = limits.max_num_seqs, limits.max_model_len
        query = MIN_PREFIX if prompt_context_blocks(limits) else MIN_LENGTH
        return default_ranges(
            limits, prompt_batch=(1, seqs), prompt_query=(query, length), prompt_context_step=length,
            decode_batch=(1, seqs), decode_context=(min(MIN_LENGTH, length), length),
        )  # fmt: skip

    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """Return `values` of the range without the power below min; `prefix_values` for one that starts at 0."""
        if bounds.min == 0:
            return prefix_values(bounds.max)
        return [value for value in values(bounds.min, bounds.max) if value >= bounds.min]


class PowersOfTwoTPU(Strategy):
    """tpu-inference's strategy, with the rule of `request_values` and the step of a range as the gap.

    A range cannot have a step of 0, which means no gap in tpu-inference. A step at or above max means the same, since
    doubling then never reaches it.
    """

    parameters: ClassVar[tuple[str, ...]] = ("min", "step", "max")

    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """Return queries from 16 tokens and decode batches from 8 sequences, up to the limits, without a gap.

        Prompt batches start at 1 and contexts at block_size: tpu-inference has no such dimensions, since it packs the
        new tokens of all sequences together and its attention reads no padding. Prompt context is only 0 where every
        prompt fits in one query. The default steps are max_num_seqs and max_model_len, the largest useful values.
        """
        seqs, length = limits.max_num_seqs, limits.max_model_len
        return default_ranges(
            limits, prompt_batch=(1, seqs), prompt_query=(MIN_TOKENS, length), prompt_context_step=length,
            decode_batch=(min(MIN_REQUESTS, seqs), seqs), decode_context=(limits.block_size, length),
        )  # fmt: skip

    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """Return `request_values` of the range, with its step as the gap; one that starts at 0 continues from 128."""
        if bounds.min > 0:
            return request_values(bounds.max, bounds.min, bounds.step)
        return [0, *request_values(bounds.max, MIN_LENGTH, bounds.step)] if bounds.max else [0]


def _require(name: str, value: int, least: int) -> None:
    if type(value) is not int:
        raise InputError(f"powers of two: {name} {value!r} is not an integer")
    if value < least:
        raise InputError(f"powers of two: {name} {value} must be at least {least}")


def _require_ordered(least: int, most: int) -> None:
    _require("min", least, 1)
    _require("max", most, 1)
    if least > most:
        raise InputError(f"powers of two: min {least} is above max {most}; swap them or raise max")
