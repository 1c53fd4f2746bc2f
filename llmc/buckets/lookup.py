"""Steps for requests that no single bucket covers: prompts are split, chunked and padded, decode batches split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llmc.buckets.bucket import Bucket, Phase
from llmc.buckets.cost import DECODE_STEP_WEIGHT, STEP_WEIGHT, cost
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan

MissPolicy = Literal["chunk", "split", "refuse"]
"""The policy for a group that no single bucket covers: `chunk` cuts prompts into chunks and the group into steps,
`split` only cuts the group into steps, `refuse` raises InputError. No group ever runs unpadded."""


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


@dataclass(frozen=True)
class DecodeStep:
    """One run of a decode bucket; `rows` are indices into the group, ascending."""

    bucket: Bucket
    rows: tuple[int, ...]


def prefill_path(
    plan: Plan, lengths: Sequence[int], past: Sequence[int] | None = None, on_miss: MissPolicy = "chunk"
) -> list[PrefillStep]:
    """The steps, in order, that prefill a group of prompts.

    `lengths[i]` is all of prompt i in tokens, and `past[i]` how many of its first tokens the cache holds
    already (default: none). Each row's spans are consecutive and end at its length. They start at past[i], or
    earlier where no bucket can take over at past[i]: the tokens between are then computed again, to the same
    values.

    A prompt is cut only where no single bucket takes the rest of it, into the longest chunks that can be
    finished; chunks at the same place of their rows' sequences then share steps where that costs less than
    steps of their own (`cost` plus STEP_WEIGHT a step). Equal arguments give equal steps.

    Raises InputError, naming the limit, when the group is not admissible: no row or more rows than
    max_num_seqs, a length outside 1 to `longest_prompt`, a past outside 0 to length − 1; when `plan` does not cover
    it; or when `on_miss` forbids what it would take.
    """
    held = [0] * len(lengths) if past is None else list(past)
    _require_admissible(plan, lengths, held)
    chains = [_chain(plan, row, length, held[row]) for row, length in enumerate(lengths)]
    for chain in chains:
        if len(chain) > 1 and on_miss != "chunk":
            raise InputError(
                f"prompt {chain[0].row} of {lengths[chain[0].row]} tokens needs {len(chain)} chunks, which miss policy "
                f"{on_miss!r} forbids; plan a longer bucket or allow chunks"
            )
    if on_miss == "refuse":
        return [_whole(plan, [chain[0] for chain in chains])]
    steps: list[PrefillStep] = []
    for turn in range(max(len(chain) for chain in chains)):
        steps.extend(_share(plan, [chain[turn] for chain in chains if turn < len(chain)]))
    return steps


def decode_path(plan: Plan, past: Sequence[int], on_miss: MissPolicy = "split") -> list[DecodeStep]:
    """The steps, in order, that give each sequence of a decode batch one token; `past[i]` tokens of it are cached.

    One step where a bucket covers all; else the batch is split among neighbours in length, at the least cost (`cost`
    plus DECODE_STEP_WEIGHT a step). A proven plan covers every admissible batch, so that only plans with gaps split.
    Raises InputError when the batch is not admissible, when a sequence alone has no bucket, or when `on_miss` is
    "refuse" and a split would be needed.
    """
    limits = plan.limits
    if not 1 <= len(past) <= limits.max_num_seqs:
        raise InputError(f"a decode batch of {len(past)}; max_num_seqs allows 1 to {limits.max_num_seqs}")
    for row, cached in enumerate(past):
        if not 0 <= cached <= limits.longest_past:
            raise InputError(
                f"sequence {row} has {cached} cached tokens; max_model_len allows 0 to {limits.longest_past}"
            )
    whole = plan.lookup("decode", len(past), 1, max(past))
    if whole is not None:
        return [DecodeStep(whole, tuple(range(len(past))))]
    if on_miss == "refuse":
        raise InputError(
            f"no decode bucket covers batch {len(past)} with {max(past)} cached tokens, and miss policy 'refuse' "
            "forbids to split it; plan a larger bucket"
        )
    chunks = sorted((_Chunk(row, cached, cached + 1) for row, cached in enumerate(past)), key=lambda chunk: chunk.start)
    groups = _cheapest_groups(plan, "decode", chunks, DECODE_STEP_WEIGHT)
    return sorted((DecodeStep(bucket, _rows(group)) for bucket, group in groups), key=lambda step: step.rows)


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


def _whole(plan: Plan, chunks: list[_Chunk]) -> PrefillStep:
    """One step for all chunks. Raises InputError where no bucket covers them."""
    new, context = max(chunk.new for chunk in chunks), max(chunk.start for chunk in chunks)
    bucket = plan.lookup("prompt", len(chunks), new, context)
    if bucket is None:
        raise InputError(
            f"no prompt bucket covers batch {len(chunks)} with {new} new and {context} cached tokens, and miss policy "
            "'refuse' forbids to split it; plan a larger bucket"
        )
    return PrefillStep(bucket, _rows(chunks), tuple((chunk.start, chunk.stop) for chunk in chunks))


def _rows(chunks: list[_Chunk]) -> tuple[int, ...]:
    return tuple(sorted(chunk.row for chunk in chunks))


def _share(plan: Plan, chunks: list[_Chunk]) -> list[PrefillStep]:
    """Steps of least total cost for chunks that may run together, among groups of neighbours in size."""
    chunks = sorted(chunks, key=lambda chunk: (chunk.new, chunk.start, chunk.row))
    steps = []
    for bucket, part in _cheapest_groups(plan, "prompt", chunks, STEP_WEIGHT):
        group = sorted(part, key=lambda chunk: chunk.row)
        steps.append(PrefillStep(bucket, _rows(group), tuple((chunk.start, chunk.stop) for chunk in group)))
    return sorted(steps, key=lambda step: step.rows)


def _cheapest_groups(
    plan: Plan, phase: Phase, chunks: list[_Chunk], step_weight: int
) -> list[tuple[Bucket, list[_Chunk]]]:
    """`chunks`, in their order, cut into groups with a bucket each, of least total cost with `step_weight` a group."""
    widest = (plan.prompt if phase == "prompt" else plan.decode)[-1].batch
    # best[n]: the least cost of the first n chunks, where the last step of it begins, and that step's bucket
    best: list[tuple[int, int, Bucket | None] | None] = [(0, 0, None)]
    for end in range(1, len(chunks) + 1):
        choices: list[tuple[int, int, Bucket | None]] = []
        context = 0
        for begin in range(end - 1, max(-1, end - 1 - widest), -1):
            context = max(context, chunks[begin].start)
            before = best[begin]
            bucket = plan.lookup(phase, end - begin, chunks[end - 1].new, context)
            if bucket is not None and before is not None:
                choices.append((before[0] + cost(bucket) + step_weight, begin, bucket))
        best.append(min(choices, key=lambda choice: choice[:2], default=None))
    groups: list[tuple[Bucket, list[_Chunk]]] = []
    end = len(chunks)
    while end:
        _, begin, bucket = best[end] or (0, 0, None)
        if bucket is None:
            chunk = chunks[end - 1]
            raise InputError(
                f"no {phase} bucket covers sequence {chunk.row} with {chunk.start} cached tokens; plan anew"
            )
        groups.append((bucket, chunks[begin:end]))
        end = begin
    return groups
