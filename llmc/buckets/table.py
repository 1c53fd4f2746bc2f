"""Lookup of the least-cost covering bucket, fast enough to run on every decode step."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost import cost

MAX_CORNERS = 1 << 24
"""Corners of the grid that a table holds in full, 4 bytes each; beyond it they are searched for when first asked."""


class LookupTable:
    """The buckets of one phase, indexed by the sorted distinct values of each dimension.

    A request is rounded up to the nearest value of every dimension, by bisection: it has the same covering buckets as
    that corner of the grid. Each corner's least-cost cover is computed beforehand, as a minimum accumulated over all
    larger corners, so that a lookup is O(log n) for plans of any form. Only where the grid has more than MAX_CORNERS
    corners (tens of thousands of unaligned buckets in three dimensions) is the first lookup of a corner O(n).
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        ordered = sorted(buckets, key=lambda bucket: (cost(bucket), bucket))
        self._by_cost: list[Bucket | None] = [*ordered, None]
        self._batches = sorted({bucket.batch for bucket in ordered})
        self._queries = sorted({bucket.query for bucket in ordered})
        self._contexts = sorted({bucket.context for bucket in ordered})
        # one corner more in each dimension, above every value, where nothing covers
        self._rows, self._columns = len(self._queries) + 1, len(self._contexts) + 1
        corners = (len(self._batches) + 1) * self._rows * self._columns
        self._ranks = self._all_corners(ordered) if corners <= MAX_CORNERS else None
        self._found: dict[int, Bucket | None] = {}

    def find(self, batch: int, query: int, context: int) -> Bucket | None:
        """The bucket of least cost that covers the request, or None when none does; ties go to the lowest."""
        corner = (bisect_left(self._batches, batch) * self._rows + bisect_left(self._queries, query)) * self._columns
        corner += bisect_left(self._contexts, context)
        if self._ranks is not None:
            return self._by_cost[self._ranks[corner]]
        if corner not in self._found:
            covering = (b for b in self._by_cost if b is not None and b.covers(batch, query, context))
            self._found[corner] = next(covering, None)
        return self._found[corner]

    def _all_corners(self, ordered: list[Bucket]) -> array[int]:
        """For each corner, the place in `_by_cost` of its least-cost cover; None stands at the last place."""
        import numpy as np

        from llmc.buckets.corners import least_of_larger

        ranks = np.full((len(self._batches) + 1, self._rows, self._columns), len(ordered), np.int32)
        places = tuple(
            np.searchsorted(values, [getattr(bucket, name) for bucket in ordered])
            for name, values in (("batch", self._batches), ("query", self._queries), ("context", self._contexts))
        )
        ranks[places] = np.arange(len(ordered), dtype=np.int32)
        return array("i", np.ascontiguousarray(least_of_larger(ranks)).tobytes())
