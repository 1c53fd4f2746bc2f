"""Buckets from rules: the product of the dimensions' values, its filters, and the buckets that coverage adds.

Each change leaves a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.coverage import gaps
from llmc.buckets.limits import Limits
from llmc.buckets.plan import MAX_BUCKETS, Note
from llmc.buckets.planner.candidates import Candidates
from llmc.buckets.planner.ranges import Ranges
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
        """Return the smallest request that rounds up to the value at index `position`."""
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
    """Return the values of every dimension of a phase."""
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
    """Return the product of the values that the limits allow, without enumerating it."""

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
    """Return the buckets of the product that the limits allow and some admissible request needs."""
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
    """The reason why no admissible request rounds up to these values, or None when one does."""
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


@dataclass
class Proposal:
    """The strategies' result: for each phase either `buckets`, which cover it, or `free`, a grid to choose from.

    `notes` list what the rules' filters changed, `completions` what coverage added.
    """

    names: dict[Phase, str]
    ranges: Ranges
    buckets: dict[Phase, list[Bucket]] = field(default_factory=dict)
    free: dict[Phase, Candidates] = field(default_factory=dict)
    notes: dict[Phase, list[Note]] = field(default_factory=dict)
    completions: list[Note] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The strategy's name; both names where the phases differ."""
        names = [self.names[phase] for phase in PHASES]
        return names[0] if names[0] == names[1] else f"prompt {names[0]}, decode {names[1]}"


def require_some(phase: Phase, buckets: list[Bucket], notes: list[Note]) -> None:
    """Raise InputError, listing the dropped buckets, when no bucket is left."""
    if not buckets:
        reasons = "; ".join(f"{note.count}: {note.text}" for note in notes if note.kind == "dropped")
        raise InputError(
            f"no {phase} bucket is left, so the plan covers nothing (dropped {reasons or 'none'}); "
            f"change the {phase} ranges or the limits"
        )


def complete(limits: Limits, phase: Phase, buckets: list[Bucket], notes: list[Note]) -> list[Bucket]:
    """Return `buckets` and at most one more, which closes every gap (`coverage` explains why one is enough) and adds a
    note.
    """
    missing = gaps(limits, buckets, phase)
    if not missing:
        return buckets
    if phase == "prompt":
        query = max(bucket.query for bucket in buckets)
        added = Bucket("prompt", 1, query, limits.read(in_blocks(limits, limits.longest_prompt - query)))
        low, high = missing[0].lengths
        why = f"{added}, prompts of {low} to {high} tokens run through it in chunks"
    else:
        longest = limits.read(limits.longest_past)
        enough = [bucket.context for bucket in buckets if bucket.context >= longest]
        context = min(enough, default=in_blocks(limits, longest))
        added = Bucket("decode", limits.max_num_seqs, 1, context)
        why = f"{added}, for {'; '.join(map(str, missing))}"
    notes.append(Note("added", why, phase, 1))
    return [*buckets, added]


def free_candidates(limits: Limits, phase: Phase, values: Axes, notes: list[Note]) -> Candidates:
    """Return every bucket that `values` and the limits allow to choose from, with the values that coverage lacks added.

    Raises InputError when there is none.
    """
    found = candidates(limits, values)
    if not all(len(column) for column in found.values) or not found.allowed(smallest(found)).any():
        raise InputError(
            f"no {phase} bucket lies within the {phase} ranges and the limits, so the plan covers nothing; widen them"
        )
    if found.covers_all() is not None:
        return found
    batches, queries, contexts = found.values
    if phase == "prompt":
        largest = int(queries[-1])
        contexts = np.union1d(contexts, [in_blocks(limits, limits.longest_prompt - largest)])
        why = f"context {contexts[-1]}, through which prompts above {largest} tokens run in chunks"
    else:
        batches = np.union1d(batches, [limits.max_num_seqs])
        contexts = np.union1d(contexts, [limits.read(in_blocks(limits, limits.longest_past))])
        why = f"batch {batches[-1]} and context {contexts[-1]}, the largest decode step"
    notes.append(Note("warning", f"the {phase} ranges alone do not cover the limits: {why}, may also be chosen", phase))
    return replace(found, values=(batches, queries, contexts))


def smallest(found: Candidates) -> NDArray[np.int64]:
    """Return the smallest point of the grid, as one row."""
    return np.array([[int(column[0]) for column in found.values]], np.int64)


def in_blocks(limits: Limits, tokens: int) -> int:
    """Return `tokens` rounded up to whole blocks, at most max_model_len."""
    return min(-(-tokens // limits.block_size) * limits.block_size, limits.max_model_len)
