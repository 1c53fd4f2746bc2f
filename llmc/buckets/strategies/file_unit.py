"""The unit of the contexts in a bucket file without a stated unit: tokens or blocks, found from the file's numbers.

The vendor's files (VLLM_BUCKETING_FROM_FILE) look alike and count KV cache blocks: of one sequence in a prompt bucket,
of the whole batch in a decode bucket. Read as tokens, such a file would give contexts a hundred times too small. So a
unit is used only if the other one is impossible:

    blocks    a context is above max_model_len, and read as blocks some decode bucket lies within it
    tokens    every context is a multiple of block_size or max_model_len itself, one decode context holds the longest
              sequence, and read as blocks some decode bucket lies beyond max_model_len
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from llmc.buckets.bucket import Phase
from llmc.buckets.limits import Limits
from llmc.errors import InputError

Unit = Literal["tokens", "blocks"]
"""What the contexts of a file count: tokens of one sequence, or KV cache blocks as the vendor's planner does."""


class FileBucket(NamedTuple):
    """One bucket of a file, in the file's unit; `line` and `column` of its spec count from 1."""

    batch: int
    query: int
    context: int
    line: int
    column: int

    @property
    def phase(self) -> Phase:
        """A query of 1 is a decode bucket, any other a prompt bucket."""
        return "decode" if self.query == 1 else "prompt"

    def __str__(self) -> str:
        return f"({self.batch}, {self.query}, {self.context})"


def recognise(listed: Sequence[FileBucket], source: str, limits: Limits) -> Unit:
    """The unit of the contexts in `listed`. Raises InputError, naming the flag, where either could be meant."""
    contexts = [spec.context for spec in listed if spec.context]
    decode = [spec for spec in listed if spec.phase == "decode" and spec.context]
    beyond = [spec for spec in decode if (blocks_each(spec) - 1) * limits.block_size >= limits.max_model_len]
    if not decode:
        return "tokens"
    if max(contexts) > limits.max_model_len:
        if len(beyond) < len(decode):
            return "blocks"
    elif (
        beyond
        and max(spec.context for spec in decode) >= limits.longest_past
        and all(context % limits.block_size == 0 or context >= limits.longest_past for context in contexts)
    ):
        return "tokens"
    example = max(decode, key=lambda spec: spec.context)
    blocks = blocks_each(example) * limits.block_size
    raise InputError(
        f"{source}: its contexts may count tokens of one sequence, or KV cache blocks of {limits.block_size} tokens as "
        f"vLLM's bucket files do ({example} is {example.context} or {blocks} tokens a sequence); say which: "
        "--context-unit tokens, or --context-unit blocks"
    )


def blocks_each(spec: FileBucket) -> int:
    """Blocks of each sequence where contexts count blocks: a decode bucket's are its whole batch's."""
    return -(-spec.context // spec.batch) if spec.phase == "decode" else spec.context
