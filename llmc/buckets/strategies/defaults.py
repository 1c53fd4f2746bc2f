"""Default ranges of the vendors' rules: the limits converted to their P, T and C."""

from __future__ import annotations

from llmc.buckets.limits import Limits
from llmc.buckets.strategies.base import Dimension, Range

LONG_MODEL_LEN = 8192
"""From this max_model_len on, the vendor sizes the prompt context by the largest query and not by the smallest."""

Start = tuple[int, int]
"""min and step of a range."""


def default_ranges(
    limits: Limits, *, prompt_batch: Start, prompt_query: Start, prompt_context_step: int, decode_batch: Start,
    decode_context: Start,
) -> dict[Dimension, Range]:  # fmt: skip
    """Return the vendors' ranges, in tokens per sequence, with these differences.

    - prompt batch stops at 64 sequences, the Gaudi guide's P;
    - prompt query stops at `longest_query`;
    - prompt context is only 0 where every prompt fits in one query, and starts at 0 elsewhere;
    - decode context counts tokens of one sequence, up to max_model_len, because a decode bucket here gives every
      sequence the same context; the guide counts the blocks of the whole batch together, in steps of max_num_seqs
      blocks, which is one block per sequence.
    """
    query, context = longest_query(limits), prompt_context_blocks(limits) * limits.block_size
    numbers: dict[Dimension, tuple[int, int, int]] = {
        "prompt_batch": (*prompt_batch, min(limits.max_num_seqs, 64)),
        "prompt_query": (min(prompt_query[0], query), prompt_query[1], query),
        "prompt_context": (0, prompt_context_step, context),
        "decode_batch": (*decode_batch, limits.max_num_seqs),
        "decode_context": (*decode_context, limits.max_model_len),
    }
    return {
        dimension: Range(*bounds, source=f"the default {dimension.replace('_', ' ')}")
        for dimension, bounds in numbers.items()
    }


def longest_query(limits: Limits) -> int:
    """Return the new tokens of the longest query, the vendor guide's T.

    It is the least of the capacity of a step (max_num_batched_tokens) and the longest prompt (max_prompt_len, or
    max_model_len where that is not set: one token more than a prompt needs, but whole blocks).
    """
    return min(limits.max_prompt_len or limits.max_model_len, limits.max_num_batched_tokens)


def prompt_context_blocks(limits: Limits) -> int:
    """Return the KV cache blocks of the longest prompt context, the vendor guide's C; 0 where no prompt or graph needs
    any.

    A prompt that fits in the largest query runs from an empty cache. Where longer ones are admitted: (length −
    block_size) // block_size, and from max_model_len 8192 on (length − T) // block_size; at least 1. The length is
    max_model_len, or max_prompt_len where that is set.
    """
    largest = longest_query(limits)
    if largest >= limits.longest_prompt or not limits.contexts:
        return 0
    query = largest if limits.max_model_len >= LONG_MODEL_LEN else min(limits.block_size, largest)
    return max(1, ((limits.max_prompt_len or limits.max_model_len) - query) // limits.block_size)
