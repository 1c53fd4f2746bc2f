"""Candidate buckets of a plan: a grid of values, complete or limited to a rule's buckets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Bucket, Phase
from llmc.buckets.cost.objective import Objective, Points
from llmc.buckets.limits import Limits
from llmc.buckets.optimise.space import ListedSpace, ProductSpace, Space


@dataclass(frozen=True)
class Candidates:
    """The grid `values` (ascending batches, queries and contexts), cut to the limits and, if given, to `members`."""

    phase: Phase
    limits: Limits
    values: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
    members: frozenset[tuple[int, int, int]] | None = None

    @classmethod
    def of(cls, phase: Phase, limits: Limits, buckets: Iterable[Bucket]) -> Candidates:
        """Create candidates of exactly the `buckets` of the phase."""
        return cls.listed(phase, limits, frozenset(bucket.shape for bucket in buckets if bucket.phase == phase))

    @classmethod
    def listed(cls, phase: Phase, limits: Limits, members: frozenset[tuple[int, int, int]]) -> Candidates:
        """Create candidates of exactly `members`, at least one."""
        columns = zip(*members, strict=True)
        batches, queries, contexts = (np.array(sorted(set(column)), np.int64) for column in columns)
        return cls(phase, limits, (batches, queries, contexts), members)

    def allowed(self, points: Points) -> NDArray[np.bool_]:
        """Return which of the grid's points [n, 3] may be buckets."""
        within = np.ones(len(points), bool)
        if self.phase == "prompt":
            within = points[:, 0] * points[:, 1] <= self.limits.max_num_batched_tokens
        if self.members is not None:
            within &= np.fromiter((tuple(point) in self.members for point in points.tolist()), bool, len(points))
        return within

    def space(self, objective: Objective, required: tuple[int, int, int]) -> Space:
        """Return the candidates as an optimiser space; `required` is always chosen."""

        def cost(points: Points) -> NDArray[np.float64]:
            return objective.cost(self.phase, points)

        if self.members is not None:
            return ListedSpace(np.array(sorted(self.members), np.int64), cost, [required])
        return ProductSpace(self.values, cost, self.allowed, [required])

    @cached_property
    def count(self) -> int:
        """Upper bound on the number of buckets."""
        size = int(np.prod([len(values) for values in self.values]))
        return size if self.members is None else len(self.members)

    def within(self, batch: int, query: int, context: int) -> Candidates:
        """Return the candidates of at most these sizes."""
        most = (batch, query, context)
        values = tuple(column[column <= size] for column, size in zip(self.values, most, strict=True))
        if self.members is not None:
            kept = frozenset(m for m in self.members if all(size <= top for size, top in zip(m, most, strict=True)))
            return Candidates.listed(self.phase, self.limits, kept)
        return Candidates(self.phase, self.limits, (values[0], values[1], values[2]))

    def up_to_batch(self, most: int) -> Candidates:
        """Return the candidates of at most `most` sequences."""
        return self.within(most, int(self.values[1][-1]), int(self.values[2][-1]))

    def round_up(self, column: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the least value of a dimension that is no smaller; above the largest value, that value + 1."""
        padded = np.append(self.values[column], self.values[column][-1] + 1)
        return padded[np.searchsorted(self.values[column], numbers)]

    def covers_all(self) -> tuple[int, int, int] | None:
        """Return the smallest bucket that alone proves the phase covered (`coverage`), or None if there is none.

        A decode bucket of max_num_seqs and the longest context; a prompt bucket that takes the longest prompt whole, or
        otherwise the one of the largest query through which it runs in chunks.
        """
        batches, queries, contexts = (values.tolist() for values in self.values)
        limits = self.limits
        batches = [b for b in batches if self.phase == "prompt" or b >= limits.max_num_seqs]
        whole = [q for q in queries if q >= limits.longest_prompt]
        chunked = [q for q in reversed(queries) if q < limits.longest_prompt]
        for query in queries if self.phase == "decode" else [*whole, *chunked]:
            needed = limits.read(limits.longest_past if self.phase == "decode" else limits.longest_prompt - query)
            points = [[b, query, c] for c in contexts if c >= needed for b in batches]
            allowed = self.allowed(np.array(points, np.int64).reshape(-1, 3))
            if allowed.any():
                first = points[int(np.argmax(allowed))]
                return first[0], first[1], first[2]
        return None
