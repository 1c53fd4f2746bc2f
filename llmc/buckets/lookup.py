"""Lookup of the least-cost bucket for a request, and of the steps for requests that no single bucket covers.

Prompts are split, chunked and padded; decode batches are split.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from llmc.buckets.bucket import Bucket, Phase
from llmc.buckets.cost.work import DECODE_STEP_WEIGHT, STEP_WEIGHT, cost
from llmc.buckets.limits import Limits
from llmc.errors import InputError

MAX_CORNERS = 1 << 24
"""Most grid corners that a table holds in full, 4 bytes each; beyond it they are searched on first use."""


class LookupTable:
    """The buckets of one phase, indexed by the sorted distinct values of each dimension.

    Bisection rounds a request up to the nearest value of every dimension. The request and that corner of the grid have
    the same covering buckets. Each corner's least-cost cover is precomputed as a minimum accumulated over all larger
    corners, so a lookup is O(log n) for any plan. Only where the grid has more than MAX_CORNERS corners (tens of
    thousands of unaligned buckets in three dimensions) is the first lookup of a corner O(n).
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        ordered = sorted(buckets, key=lambda bucket: (cost(bucket), bucket))
        self._by_cost: list[Bucket | None] = [*ordered, None]
        self._batches = sorted({bucket.batch for bucket in ordered})
        self._queries = sorted({bucket.query for bucket in ordered})
        self._contexts = sorted({bucket.context for bucket in ordered})
        # one extra corner in each dimension, above every value, where no bucket covers
        self._rows, self._columns = len(self._queries) + 1, len(self._contexts) + 1
        corners = (len(self._batches) + 1) * self._rows * self._columns
        self._ranks = self._all_corners(ordered) if corners <= MAX_CORNERS else None
        self._found: dict[int, Bucket | None] = {}

    def find(self, batch: int, query: int, context: int) -> Bucket | None:
        """Return the least-cost bucket that covers the request, or None; ties go to the lowest."""
        corner = (bisect_left(self._batches, batch) * self._rows + bisect_left(self._queries, query)) * self._columns
        corner += bisect_left(self._contexts, context)
        if self._ranks is not None:
            return self._by_cost[self._ranks[corner]]
        if corner not in self._found:
            covering = (b for b in self._by_cost if b is not None and b.covers(batch, query, context))
            self._found[corner] = next(covering, None)
        return self._found[corner]

    def _all_corners(self, ordered: list[Bucket]) -> array[int]:
        """For each corner, the index in `_by_cost` of its least-cost cover; the last index means None."""
        import numpy as np

        from llmc.buckets.cost.work import least_of_larger

        ranks = np.full((len(self._batches) + 1, self._rows, self._columns), len(ordered), np.int32)
        indices = tuple(
            np.searchsorted(values, [getattr(bucket, name) for bucket in ordered])
            for name, values in (("batch", self._batches), ("query", self._queries), ("context", self._contexts))
        )
        ranks[indices] = np.arange(len(ordered), dtype=np.int32)
        return array("i", np.ascontiguousarray(least_of_larger(ranks)).tobytes())


@dataclass(frozen=True)
class BucketSet:
    """Sorted buckets under limits, with least-cost lookup."""

    limits: Limits
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(sorted(self.buckets)))

    @cached_property
    def prompt(self) -> tuple[Bucket, ...]:
        """The prompt buckets, ascending by batch, query, context."""
        return tuple(bucket for bucket in self.buckets if bucket.phase == "prompt")

    @cached_property
    def decode(self) -> tuple[Bucket, ...]:
        """The decode buckets, ascending by batch, context."""
        return tuple(bucket for bucket in self.buckets if bucket.phase == "decode")

    def of(self, phase: Phase) -> tuple[Bucket, ...]:
        """Return the buckets of one phase, ascending."""
        return self.prompt if phase == "prompt" else self.decode

    @cached_property
    def prompt_reach(self) -> tuple[tuple[int, int], ...]:
        """(context, query) of the prompt buckets that no other exceeds in both, ascending by context.

        After `past` cached tokens, one run takes at most the query of the first pair with at least that context. Where
        graphs read no cached tokens, it is always the largest query.
        """
        if not self.limits.contexts:
            return ((self.limits.max_model_len, max(bucket.query for bucket in self.prompt)),)
        reach: list[tuple[int, int]] = []
        for context, query in sorted({(bucket.context, bucket.query) for bucket in self.prompt}, reverse=True):
            if not reach or query > reach[-1][1]:
                reach.append((context, query))
        return tuple(reversed(reach))

    @cached_property
    def _tables(self) -> dict[Phase, LookupTable]:
        return {"prompt": LookupTable(self.prompt), "decode": LookupTable(self.decode)}

    def lookup(self, phase: Phase, batch: int, query: int, context: int) -> Bucket | None:
        """Return the bucket of least `cost` that covers the request, or None.

        `batch` sequences of at most `query` new tokens (decode: 1) and `context` cached tokens each. Takes O(log n),
        about a microsecond; the first call builds the index.
        """
        return self._tables[phase].find(batch, query, self.limits.read(context))


MissPolicy = Literal["chunk", "split", "refuse"]
"""The policy for a group that no single bucket covers: `chunk` cuts prompts into chunks and the group into steps,
`split` only cuts the group into steps, `refuse` raises InputError. No group ever runs unpadded."""


@dataclass(frozen=True)
class PrefillStep:
    """One run of a prompt bucket.

    `rows` are ascending indices into the group; `spans` has for each of them the half-open range (start, stop) of its
    prompt tokens that this run computes. Row k of the batch holds rows[k], right-padded to `bucket.query`; its context
    is the `start` tokens before, which earlier steps computed or the cache held.
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
    """One run of a decode bucket; `rows` are ascending indices into the group."""

    bucket: Bucket
    rows: tuple[int, ...]


def prefill_path(
    plan: BucketSet, lengths: Sequence[int], past: Sequence[int] | None = None, on_miss: MissPolicy = "chunk"
) -> list[PrefillStep]:
    """Return the steps, in order, that prefill a group of prompts.

    `lengths[i]` is the total length of prompt i in tokens; `past[i]` of them are already in the cache (default: none).
    Each row's spans are consecutive and end at its length. They start at past[i], or earlier where no bucket can
    continue at past[i]. The tokens between are then computed again, to the same values.

    A prompt is split only where no single bucket takes the rest of it, into the longest chunks that can be finished.
    Chunks at the same index of their rows' sequences share steps where that costs less than separate steps (`cost` plus
    STEP_WEIGHT per step). Equal arguments give equal steps.

    Raises InputError, naming the limit, when the group is not admissible: no rows or more rows than max_num_seqs, a
    length outside 1 to `longest_prompt`, a past outside 0 to length − 1. Also when `plan` does not cover the group, or
    `on_miss` forbids the needed steps.
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


def decode_path(plan: BucketSet, past: Sequence[int], on_miss: MissPolicy = "split") -> list[DecodeStep]:
    """Return the steps, in order, that compute one token for each sequence of a decode batch; `past[i]` tokens are
    cached.

    One step where a bucket covers all; otherwise the batch is split among neighbours in length, at the least cost
    (`cost` plus DECODE_STEP_WEIGHT per step). A proven plan covers every admissible batch, so only plans with gaps
    split. Raises InputError when the batch is not admissible, when a sequence alone has no bucket, or when `on_miss` is
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


def _require_admissible(plan: BucketSet, lengths: Sequence[int], past: Sequence[int]) -> None:
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


def _chain(plan: BucketSet, row: int, length: int, past: int) -> list[_Chunk]:
    """The chunks of one prompt, each of which some bucket runs.

    `last` is the latest offset from which one bucket finishes the prompt. Every bucket with a context of at least
    `last` also serves each earlier offset, so a chunk may stop anywhere up to it and never be stuck.
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


def _whole(plan: BucketSet, chunks: list[_Chunk]) -> PrefillStep:
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


def _share(plan: BucketSet, chunks: list[_Chunk]) -> list[PrefillStep]:
    chunks = sorted(chunks, key=lambda chunk: (chunk.new, chunk.start, chunk.row))
    steps = []
    for bucket, part in _cheapest_groups(plan, "prompt", chunks, STEP_WEIGHT):
        group = sorted(part, key=lambda chunk: chunk.row)
        steps.append(PrefillStep(bucket, _rows(group), tuple((chunk.start, chunk.stop) for chunk in group)))
    return sorted(steps, key=lambda step: step.rows)


def _cheapest_groups(
    plan: BucketSet, phase: Phase, chunks: list[_Chunk], step_weight: int
) -> list[tuple[Bucket, list[_Chunk]]]:
    """Split `chunks`, in order, into groups with a bucket each, of least total cost with `step_weight` per group."""
    widest = plan.of(phase)[-1].batch
    # best[n]: the least cost of the first n chunks, the start of its last step, and that step's bucket
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
