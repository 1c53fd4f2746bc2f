"""How a group of prompts runs through the prompt buckets: split, chunked and padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost import STEP_WEIGHT, cost
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan


@dataclass(frozen=True)
class PrefillStep:
    """One run of a prompt bucket.

    `rows` are indices into the group, ascending; `spans` has for each of them the half-open range (start,
    stop) of its prompt tokens that this run computes. Row k of the batch holds rows[k], right-padded to
    `bucket.query`; its context is the `start` tokens before, which earlier steps computed or the cache held.
    """

    bucket: Bucket
    rows: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Chunk:
    row: int
    start: int
    stop: int

    @property
    def new(self) -> int:
        return self.stop - self.start


def prefill_path(plan: Plan, lengths: Sequence[int], past: Sequence[int] | None = None) -> list[PrefillStep]:
    """The steps, in order, that prefill a group of prompts.

    `lengths[i]` is all of prompt i in tokens, and `past[i]` how many of its first tokens the cache holds
    already (default: none). Each row's spans are consecutive and end at its length. They start at past[i], or
    earlier where no bucket can take over at past[i]: the tokens between are then computed again, to the same
    values.

    A prompt is cut only where no single bucket takes the rest of it, into the longest chunks that can be
    finished; chunks at the same place of their rows' sequences then share steps where that costs less than
    steps of their own (`cost` plus STEP_WEIGHT a step). Equal arguments give equal steps.

    Raises InputError, naming the limit, when the group is not admissible: no row or more rows than
    max_num_seqs, a length outside 1 to `longest_prompt`, a past outside 0 to length − 1; or when `plan` does
    not cover it.
    """
    held = [0] * len(lengths) if past is None else list(past)
    _require_admissible(plan, lengths, held)
    chains = [_chain(plan, row, length, held[row]) for row, length in enumerate(lengths)]
    steps: list[PrefillStep] = []
    for turn in range(max(len(chain) for chain in chains)):
        steps.extend(_share(plan, [chain[turn] for chain in chains if turn < len(chain)]))
    return steps


def _require_admissible(plan: Plan, lengths: Sequence[int], past: Sequence[int]) -> None:
    limits = plan.limits
    if len(past) != len(lengths):
        raise InputError(f"{len(lengths)} lengths but {len(past)} pasts; give one past for each prompt")
    if not 1 <= len(lengths) <= limits.max_num_seqs:
        raise InputError(f"a group of {len(lengths)} prompts; max_num_seqs allows 1 to {limits.max_num_seqs}")
    name = "max_model_len - 1" if limits.max_prompt_len is None else "max_prompt_len"
    for row, (length, cached) in enumerate(zip(lengths, past, strict=True)):
        if not 1 <= length <= limits.longest_prompt:
            raise InputError(
                f"prompt {row} has {length} tokens; {name} allows 1 to {limits.longest_prompt}: shorten it"
            )
        if not 0 <= cached < length:
            raise InputError(f"prompt {row} has {cached} of {length} tokens in the cache; at least one must be new")


def _chain(plan: Plan, row: int, length: int, past: int) -> list[_Chunk]:
    """The chunks of one prompt, each of which some bucket runs.

    `last` is the latest place from which one bucket finishes the prompt. Every bucket with a context of at
    least `last` also serves each earlier place, so that a chunk may stop anywhere up to it and never be
    stuck.
    """
    reach = plan.prompt_reach
    last = max((context for context, query in reach if context + query >= length), default=-1)
    if last < 0:
        raise InputError(f"prompt {row} of {length} tokens is not covered by this plan; plan anew")
    chunks: list[_Chunk] = []
    start = min(past, last)
    while start < length:
        query = next(query for context, query in reach if context >= start)
        stop = length if start + query >= length else min(start + query, last)
        chunks.append(_Chunk(row, start, stop))
        start = stop
    return chunks


def _share(plan: Plan, chunks: list[_Chunk]) -> list[PrefillStep]:
    """Steps of least total cost for chunks that may run together, among groups of neighbours in size."""
    chunks = sorted(chunks, key=lambda chunk: (chunk.new, chunk.start, chunk.row))
    widest = plan.prompt[-1].batch
    # best[n]: the least cost of the first n chunks, where the last step of it begins, and that step's bucket
    best: list[tuple[int, int, Bucket | None]] = [(0, 0, None)]
    for end in range(1, len(chunks) + 1):
        choices: list[tuple[int, int, Bucket | None]] = []
        context = 0
        for begin in range(end - 1, max(-1, end - 1 - widest), -1):
            context = max(context, chunks[begin].start)
            bucket = plan.lookup("prompt", end - begin, chunks[end - 1].new, context)
            if bucket is not None:
                choices.append((best[begin][0] + cost(bucket) + STEP_WEIGHT, begin, bucket))
        best.append(min(choices, key=lambda choice: choice[:2]))
    steps: list[PrefillStep] = []
    end = len(chunks)
    while end:
        _, begin, bucket = best[end]
        if bucket is not None:
            group = sorted(chunks[begin:end], key=lambda chunk: chunk.row)
            rows = tuple(chunk.row for chunk in group)
            steps.append(PrefillStep(bucket, rows, tuple((chunk.start, chunk.stop) for chunk in group)))
        end = begin
    return sorted(steps, key=lambda step: step.rows)
