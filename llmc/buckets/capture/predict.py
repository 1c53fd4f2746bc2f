"""Prediction of a graph's size from the graphs of its phase captured before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from llmc.buckets.bucket import Bucket

SizeOf = Callable[[Bucket], int]
"""Expected bytes of a bucket's graph; 0 for every bucket where sizes are unknown."""


class Predictor:
    """Predicts graph sizes of one phase, in proportion to expected size or to new tokens.

    A graph's weight is its `expected` size, or `Bucket.tokens` where that is None or 0. HabanaAI's fork uses the mean
    bytes per token of all graphs so far. This predictor uses the larger of the mean bytes per weight and those of the
    heaviest graph. The mean suffices where graphs have a fixed part, and is too small where they grow faster than their
    weight.

    A prediction grows with the weight, and is at least the size of every lighter graph. If `expected` is off by a
    constant factor, predictions are exact from the second graph on. Before the first measurement, it returns the
    expected size, or 0. `add` and a prediction take O(log n) comparisons.
    """

    def __init__(self, expected: SizeOf | None = None) -> None:
        self._expected = expected
        self._weights = self._bytes = 0
        self._heaviest = (0, 0)
        self._at: list[int] = []
        self._held: list[int] = []

    def __call__(self, bucket: Bucket) -> int:
        """Return the predicted bytes of the bucket's graph."""
        if not self._weights:
            return self._expected(bucket) if self._expected is not None else 0
        own = self._weight(bucket)
        mean = -(-self._bytes * own // self._weights)
        weight, size = self._heaviest
        index = bisect_right(self._at, own)
        return max(mean, -(-size * own // weight), self._held[index - 1] if index else 0)

    def add(self, bucket: Bucket, size: int) -> None:
        """Record that the bucket's graph took `size` bytes."""
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
