"""The bytes of the next graph of a phase, predicted from those captured before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from llmc.buckets.bucket import Bucket

SizeOf = Callable[[Bucket], int]
"""Bytes that the graph of a bucket is expected to take; 0, of every bucket alike, where nobody knows."""


class Predictor:
    """Predicts the graphs of one phase in proportion to what they are expected to take, or to their new tokens.

    Graphs are weighed by `expected`; where it is None or says 0, by `Bucket.tokens`. HabanaAI's fork takes the mean
    bytes a token of all graphs so far. This predictor takes the larger one of the mean bytes a weight and of those of
    the graph that weighs most: the mean is enough where graphs have a fixed part, and too little where they grow faster
    than their weight. It never says less than a graph of no more weight took. So a prediction grows with the weight
    (monotone), and is at least what was measured; an `expected` that is wrong by a factor gives exact predictions from
    the second graph on.

    Before the first measurement it says what `expected` does, or 0 without one. `add` and a prediction take
    O(log n) comparisons.
    """

    def __init__(self, expected: SizeOf | None = None) -> None:
        self._expected = expected
        self._weights = self._bytes = 0
        self._heaviest = (0, 0)
        self._at: list[int] = []
        self._held: list[int] = []

    def __call__(self, bucket: Bucket) -> int:
        """Bytes that the bucket's graph should take."""
        if not self._weights:
            return self._expected(bucket) if self._expected is not None else 0
        own = self._weight(bucket)
        mean = -(-self._bytes * own // self._weights)
        weight, size = self._heaviest
        index = bisect_right(self._at, own)
        return max(mean, -(-size * own // weight), self._held[index - 1] if index else 0)

    def add(self, bucket: Bucket, size: int) -> None:
        """The bucket's graph took `size` bytes."""
        weight = self._weight(bucket)
        self._weights += weight
        self._bytes += size
        self._heaviest = max(self._heaviest, (weight, size))
        index = bisect_right(self._at, weight)
        if index and self._held[index - 1] >= size:
            return
        end = index
        while end < len(self._at) and self._held[end] <= size:
            end += 1
        self._at[index:end] = [weight]
        self._held[index:end] = [size]

    def _weight(self, bucket: Bucket) -> int:
        return (0 if self._expected is None else self._expected(bucket)) or bucket.tokens
