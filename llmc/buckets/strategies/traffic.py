"""Traffic: the values that buckets may be chosen from; which of them are worth a graph, recorded traffic decides.

The only strategy that is no rule. Its ranges say where buckets may lie, as finely as the numbers allow, and the planner
chooses the best few (`llmc.buckets.selection`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.strategies import linear
from llmc.buckets.strategies.base import Dimension, Range
from llmc.settings import BOUNDS

FINEST = 1 << 14
"""Most query lengths to choose from by default: every length up to 16,384 tokens, multiples above that."""


def values(min: int, step: int, max: int) -> list[int]:  # noqa: A002 - spelled as the other rules
    """Where buckets may lie: the values of the linear rule, and max. Raises InputError as `Range` does."""
    found = linear.values(min, step, max)
    return found if found and found[-1] == max else [*found, max]


class Traffic:
    """The traffic strategy; see `values`, and `llmc.buckets.strategies.base` for the contract."""

    parameters: ClassVar[tuple[str, ...]] = BOUNDS

    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """Every batch, every query length (or up to FINEST of them), and contexts in blocks of block_size.

        Prompt contexts other than 0 only where max_num_batched_tokens is below the longest prompt, so that prompts
        run in chunks.
        """
        seqs, block, length = limits.max_num_seqs, limits.block_size, limits.max_model_len
        longest = min(limits.longest_prompt, limits.max_num_batched_tokens)
        step = -(-longest // FINEST)
        behind = min(-(-(limits.longest_prompt - longest) // block) * block, length)
        return {
            "prompt_batch": Range(1, 1, min(seqs, 64)),
            "prompt_query": Range(step, step, longest),
            "prompt_context": Range(0, block, behind),
            "decode_batch": Range(1, 1, seqs),
            "decode_context": Range(block, block, length),
        }

    def complete(self, dimension: Dimension, bounds: Range, limits: Limits) -> Range:
        """`bounds`: there are no other numbers."""
        return bounds

    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """`values` of the range; the same for every dimension."""
        return values(bounds.min, bounds.step, bounds.max)
