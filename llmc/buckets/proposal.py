"""The proposals of strategies, before a choice: buckets by rule, or a grid to choose from freely."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.candidates import Candidates
from llmc.buckets.coverage import gaps
from llmc.buckets.grid import Axes, candidates
from llmc.buckets.limits import Limits
from llmc.buckets.provenance import Note
from llmc.buckets.ranges import Ranges
from llmc.errors import InputError


@dataclass
class Proposal:
    """The strategies' answer: for each phase either `buckets`, which cover it, or `free`, a grid to choose from.

    `notes` say what the rules' filters did, `completions` what coverage added.
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
        """The strategy's name; both, where the phases differ."""
        names = [self.names[phase] for phase in PHASES]
        return names[0] if names[0] == names[1] else f"prompt {names[0]}, decode {names[1]}"


def require_some(phase: Phase, buckets: list[Bucket], notes: list[Note]) -> None:
    """Raise InputError, with what was dropped, when no bucket is left."""
    if not buckets:
        reasons = "; ".join(f"{note.count}: {note.text}" for note in notes if note.kind == "dropped")
        raise InputError(
            f"no {phase} bucket is left, so the plan covers nothing (dropped {reasons or 'none'}); "
            f"change the {phase} ranges or the limits"
        )


def complete(limits: Limits, phase: Phase, buckets: list[Bucket], notes: list[Note]) -> list[Bucket]:
    """`buckets` and at most one more, which closes every gap (see `coverage` for why one is enough) and adds a note."""
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
    """Every bucket that `values` and the limits allow to choose from, with the values that coverage lacks added.

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
    notes.append(Note("warning", f"the {phase} ranges alone do not cover the limits: {why}, may be chosen too", phase))
    return replace(found, values=(batches, queries, contexts))


def smallest(found: Candidates) -> NDArray[np.int64]:
    """The smallest point of the grid, as one row."""
    return np.array([[int(column[0]) for column in found.values]], np.int64)


def in_blocks(limits: Limits, tokens: int) -> int:
    """`tokens` rounded up to whole blocks, at most max_model_len."""
    return min(-(-tokens // limits.block_size) * limits.block_size, limits.max_model_len)
