"""Linear strategy: doubling up to the step, then every multiple of the step.

Rule and defaults follow the Gaudi bucketing guide. Padding of one dimension is below `step`, with max / step values:
right for short models, far too many graphs for very long ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmc.buckets.limits import Limits
from llmc.buckets.strategies.base import Dimension, Range, Strategy
from llmc.buckets.strategies.defaults import default_ranges


def values(min: int, step: int, max: int) -> list[int]:  # noqa: A002 - the public spelling of the rule
    """Return ascending values of the ramp-up rule for (min, step, max); for example (2, 32, 64) → 2 4 8 16 32 64.

    Ramp-up: min, 2·min, 4·min … while below step. Stable: the multiples of step. Both up to max, none below min. A min
    of 0 means min = step, and 0 in front. max itself is a value only when the rule reaches it. The result is empty when
    no multiple of step lies in [min, max] and min ≥ step: the rule is exact, and the planner adds the top. Raises
    InputError for bounds that `Range` refuses.
    """
    bounds = Range(min, step, max, source="linear")
    step, start = bounds.step, bounds.min or bounds.step
    ramp_up = []
    value = start
    while value < step and value <= max:
        ramp_up.append(value)
        value *= 2
    stable = [multiple for multiple in range(step, max + 1, step) if multiple >= start]
    zero = [0] if bounds.min == 0 else []
    return zero + ramp_up + stable


class Linear(Strategy):
    """The linear strategy, with the rule of `values`."""

    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """Return the guide's ranges (`default_ranges`) with prompt context 0: the guide's two-dimensional buckets."""
        block, step = limits.block_size, min(limits.max_num_seqs, 32)
        ranges = default_ranges(
            limits, prompt_batch=(1, step), prompt_query=(block, block), prompt_context_step=block,
            decode_batch=(1, step), decode_context=(block, block),
        )  # fmt: skip
        return ranges | {"prompt_context": Range(0, block, 0)}

    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """Return `values` of the range; the same rule for every dimension."""
        return values(bounds.min, bounds.step, bounds.max)
