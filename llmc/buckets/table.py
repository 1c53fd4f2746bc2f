"""Lookup of the least-cost covering bucket, fast enough to run on every decode step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost import cost


class LookupTable:
    """The buckets of one phase, indexed by the sorted distinct values of each dimension.

    A request is rounded up to the nearest value of every dimension, by bisection. Where a bucket has exactly
    those values it is the answer, since cost grows in every dimension; on the few corners without a bucket (a
    filter dropped it) the buckets are searched once in order of cost, and the answer is remembered.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._by_cost = sorted(buckets, key=lambda bucket: (cost(bucket), bucket))
        self._batches = sorted({bucket.batch for bucket in self._by_cost})
        self._queries = sorted({bucket.query for bucket in self._by_cost})
        self._contexts = sorted({bucket.context for bucket in self._by_cost})
        self._corners: dict[tuple[int, int, int], Bucket | None] = {
            (bucket.batch, bucket.query, bucket.context): bucket for bucket in self._by_cost
        }

    def find(self, batch: int, query: int, context: int) -> Bucket | None:
        """The bucket of least cost that covers the request, or None when none does; ties go to the lowest."""
        try:
            corner = (
                self._batches[bisect_left(self._batches, batch)],
                self._queries[bisect_left(self._queries, query)],
                self._contexts[bisect_left(self._contexts, context)],
            )
        except IndexError:
            return None
        try:
            return self._corners[corner]
        except KeyError:
            found = next((bucket for bucket in self._by_cost if bucket.covers(*corner)), None)
            self._corners[corner] = found
            return found
