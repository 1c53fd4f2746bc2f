"""Linear: doubling up to the step, then every multiple of the step.

Rule and defaults from the Gaudi bucketing guide, restated. Padding of one dimension is below `step`, at the
price of max / step values: right for short models, far too many graphs for very long ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.strategies.base import Dimension, Range
from llmc.settings import BOUNDS


def values(min: int, step: int, max: int) -> list[int]:  # noqa: A002 - the public spelling of the rule
    """Ascending values of the ramp-up rule for (min, step, max); for example (2, 32, 64) → 2 4 8 16 32 64.

    Ramp-up: min, 2·min, 4·min … while below step. Stable: the multiples of step. Both up to max, none below
    min. A min of 0 means min = step, and 0 in front. max itself is a value only when the rule reaches it, and
    the result is empty when no multiple of step lies in [min, max] and min ≥ step: the rule is kept exact,
    planners add the top. Raises InputError for bounds that `Range` refuses.
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


class Linear:
    """The linear strategy; see `values` for the rule and `llmc.buckets.strategies.base` for the contract."""

    parameters: ClassVar[tuple[str, ...]] = BOUNDS

    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """The guide's ranges, with these differences, each of which saves graphs that could never run.

        - prompt query stops at the longest query a step can hold (max_num_batched_tokens) or a prompt can
          have;
        - prompt context is 0 alone, the guide's two-dimensional buckets;
        - decode context counts tokens of one sequence, block_size up to max_model_len, because a decode
          bucket here gives every sequence the same context; the guide counts the blocks of the whole batch
          together.
        """
        seqs, block, length = limits.max_num_seqs, limits.block_size, limits.max_model_len
        longest_query = min(limits.max_prompt_len or length, limits.max_num_batched_tokens)
        return {
            "prompt_batch": Range(1, min(seqs, 32), min(seqs, 64)),
            "prompt_query": Range(min(block, longest_query), block, longest_query),
            "prompt_context": Range(0, block, 0),
            "decode_batch": Range(1, min(seqs, 32), seqs),
            "decode_context": Range(block, block, length),
        }

    def complete(self, dimension: Dimension, bounds: Range, limits: Limits) -> Range:
        """`bounds`: the rule has no other numbers."""
        return bounds

    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """`values` of the range; the same rule for every dimension."""
        return values(bounds.min, bounds.step, bounds.max)
