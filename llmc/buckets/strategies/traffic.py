"""Traffic strategy: a grid of values, from which recorded traffic selects the buckets.

This strategy is not a rule. Its ranges say where buckets may lie, as finely as the numbers allow, and the planner
chooses the best few (`llmc.buckets.planner.choice`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmc.buckets.limits import Limits
from llmc.buckets.strategies import linear
from llmc.buckets.strategies.base import Dimension, Range, Strategy
from llmc.errors import InputError

FINEST = 1 << 14
"""Most query lengths to choose from by default: every length up to 16,384 tokens, multiples beyond."""


def values(lengths: Iterable[int], graphs: int, max: int | None = None) -> list[int]:  # noqa: A002 - as the rules
    """Return at most `graphs` ascending values, the last of them `max` (default: the longest), that minimise padding.

    Each length is padded to the next value; no other choice has a smaller sum of padded lengths. Exact, by dynamic
    programming. Raises InputError for no lengths, one below 1 or above max, or less than 1 graph.
    """
    import numpy as np

    from llmc.buckets.optimise.demand import Demand
    from llmc.buckets.optimise.solver import choose
    from llmc.buckets.optimise.space import ProductSpace

    known = np.array(list(lengths), np.int64)
    if not len(known):
        raise InputError("traffic: there are no lengths to choose values for; give at least one")
    top = int(known.max()) if max is None else max
    if known.min() < 1 or known.max() > top:
        wrong = int(known.min()) if known.min() < 1 else int(known.max())
        raise InputError(f"traffic: length {wrong} is not within 1 and {top}")
    space = ProductSpace([np.unique(np.append(known, top))], lambda points: points[:, 0].astype(float), None, [(top,)])
    return [value for (value,) in choose(space, Demand(known[:, None], np.ones(len(known))), graphs).buckets]


def multiples(min: int, step: int, max: int) -> list[int]:  # noqa: A002 - spelled as the rules
    """Return the possible values of buckets: those of the linear rule, and max. Raises InputError like `Range`."""
    found = linear.values(min, step, max)
    return found if found and found[-1] == max else [*found, max]


class TrafficStrategy(Strategy):
    """The traffic strategy, with the values of `multiples`."""

    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """Return every batch, every query length (or up to FINEST of them), and contexts in blocks of block_size.

        Prompt contexts other than 0 occur only where max_num_batched_tokens is below the longest prompt, so that
        prompts run in chunks.
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

    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """Return `multiples` of the range; the same for every dimension."""
        return multiples(bounds.min, bounds.step, bounds.max)
