"""The product of the dimensions' values, and the filters on it; each change leaves a note."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Bucket, Phase
from llmc.buckets.candidates import Candidates
from llmc.buckets.limits import Limits
from llmc.buckets.plan import MAX_BUCKETS
from llmc.buckets.provenance import Note
from llmc.buckets.strategies.base import Dimension, Range, Strategy
from llmc.errors import InputError


@dataclass(frozen=True)
class Axis:
    """The ascending values of one dimension, and its top where the strategy's rule does not reach it."""

    dimension: Dimension
    bounds: Range
    values: tuple[int, ...]
    added_top: int | None

    def least_request(self, position: int) -> int:
        """The smallest request that rounds up to the value at `position`."""
        if position:
            return self.values[position - 1] + 1
        return 0 if self.dimension.endswith("_context") else 1


@dataclass(frozen=True)
class Axes:
    """The dimensions of one phase; decode has no query, which is always 1."""

    phase: Phase
    batches: Axis
    queries: Axis | None
    contexts: Axis


def axes(limits: Limits, phase: Phase, strategy: Strategy, ranges: Mapping[Dimension, Range]) -> Axes:
    """The values of every dimension of a phase."""
    seqs, length, longest = limits.max_num_seqs, limits.max_model_len, limits.longest_prompt
    if phase == "decode":
        return Axes(
            phase,
            _axis(strategy, "decode_batch", ranges, seqs, seqs),
            None,
            _axis(strategy, "decode_context", ranges, limits.read(limits.longest_past), limits.read(length)),
        )
    return Axes(
        phase,
        _axis(strategy, "prompt_batch", ranges, seqs, seqs),
        _axis(strategy, "prompt_query", ranges, longest, length),
        _axis(strategy, "prompt_context", ranges, limits.read(longest - 1), limits.read(length)),
    )


def candidates(limits: Limits, found: Axes) -> Candidates:
    """The product of the values that the limits allow, not enumerated."""

    def within(values: Sequence[int], most: int) -> NDArray[np.int64]:
        return np.array([value for value in values if value <= most], np.int64)

    return Candidates(
        found.phase,
        limits,
        (
            within(found.batches.values, limits.max_num_seqs),
            within(found.queries.values if found.queries else (1,), limits.max_model_len),
            within(found.contexts.values, limits.read(limits.max_model_len)),
        ),
    )


def _axis(strategy: Strategy, dimension: Dimension, ranges: Mapping[Dimension, Range], needed: int, limit: int) -> Axis:
    """The strategy's values, and a top where they stop below both the range's max and `needed`."""
    bounds = ranges[dimension]
    values = strategy.values(dimension, bounds) if bounds.max else [0]
    highest = max((value for value in values if value <= limit), default=-1)
    top = None
    if highest < min(bounds.max, needed):
        top = min(bounds.max, limit)
        values = sorted([*values, top])
    return Axis(dimension, bounds, tuple(values), top)


def grid(limits: Limits, found: Axes) -> tuple[list[Bucket], list[Note]]:
    """The buckets of the product that the limits allow and some admissible request needs."""
    phase, batches, queries, contexts = found.phase, found.batches, found.queries, found.contexts
    query_values: Sequence[int] = queries.values if queries else (1,)
    size = len(batches.values) * len(query_values) * len(contexts.values)
    if size > MAX_BUCKETS:
        raise InputError(
            f"{phase}: {len(batches.values)} batches × {len(query_values)} queries × {len(contexts.values)} "
            f"contexts are {size} buckets, more than {MAX_BUCKETS}; raise the steps or lower the maxima"
        )
    kept: list[Bucket] = []
    dropped: Counter[str] = Counter()
    for j, query in enumerate(query_values):
        for k, context in enumerate(contexts.values):
            least_query = queries.least_request(j) if queries else 1
            reason = _unneeded(limits, phase, least_query, contexts.least_request(k))
            for batch in batches.values:
                bucket = Bucket(phase, batch, query, context)
                why = _over_limit(limits, bucket) or reason
                if why is None:
                    kept.append(bucket)
                else:
                    dropped[why] += 1
    notes = [Note("dropped", reason, phase, count) for reason, count in sorted(dropped.items())]
    notes += _top_notes(kept, phase, [axis for axis in (batches, queries, contexts) if axis is not None])
    return kept, notes


def _over_limit(limits: Limits, bucket: Bucket) -> str | None:
    found = limits.exceeded(bucket)
    return f"{found[0]} above {found[2]} {found[3]}" if found else None


def _unneeded(limits: Limits, phase: Phase, least_query: int, least_context: int) -> str | None:
    """Why no admissible request rounds up to these values, or None when one does."""
    if phase == "prompt" and least_query + least_context > limits.longest_prompt:
        return f"needed only by prompts above the longest admitted, {limits.longest_prompt} tokens"
    if phase == "decode" and least_context > limits.longest_past:
        return f"needed only by contexts above the longest admitted, {limits.longest_past} tokens"
    return None


def _top_notes(kept: list[Bucket], phase: Phase, axes: list[Axis]) -> list[Note]:
    notes = []
    for axis in axes:
        name = axis.dimension.removeprefix(f"{phase}_")
        count = sum(1 for bucket in kept if getattr(bucket, name) == axis.added_top)
        if count:
            numbers = f"{axis.bounds.min},{axis.bounds.step},{axis.bounds.max}"
            text = f"the top of {name}, {axis.added_top}, which {numbers} does not reach by its rule"
            notes.append(Note("added", text, phase, count))
    return notes
