"""What the default ranges of the vendor strategies share: how the limits become their P, T and C."""

from __future__ import annotations

from llmc.buckets.limits import Limits
from llmc.buckets.strategies.base import Dimension, Range

LONG_MODEL_LEN = 8192
"""From this max_model_len on, the vendor sizes the prompt context by the largest query and not by the smallest."""


def prefill_sequences(limits: Limits) -> int:
    """Most sequences of one prompt step, the vendor guide's P: max_num_seqs, at most 64."""
    return min(limits.max_num_seqs, 64)


def longest_query(limits: Limits) -> int:
    """New tokens of the longest query, the vendor guide's T.

    What a step can hold (max_num_batched_tokens) or a prompt can have (max_prompt_len, or max_model_len where that
    is not set: one token more than a prompt needs, but whole blocks).
    """
    return min(limits.max_prompt_len or limits.max_model_len, limits.max_num_batched_tokens)


def prompt_context_blocks(limits: Limits) -> int:
    """KV cache blocks of the longest prompt context, the vendor guide's C, or 0 where no prompt or graph needs any.

    A prompt that fits in the largest query runs from an empty cache. Where longer ones are admitted:
    (length − block_size) // block_size, and from max_model_len 8192 on (length − T) // block_size; at least 1. The
    length is max_model_len, or max_prompt_len where that is set.
    """
    largest = longest_query(limits)
    if largest >= limits.longest_prompt or not limits.contexts:
        return 0
    query = largest if limits.max_model_len >= LONG_MODEL_LEN else min(limits.block_size, largest)
    return max(1, ((limits.max_prompt_len or limits.max_model_len) - query) // limits.block_size)


def default(dimension: Dimension, least: int, step: int, most: int) -> Range:
    """A default range, which says in messages that it is one."""
    return Range(least, step, most, source=f"the default {dimension.replace('_', ' ')}")
