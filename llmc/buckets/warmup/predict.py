"""The bytes of the next graph of a phase, predicted from those captured before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from llmc.buckets.bucket import Bucket

SizeOf = Callable[[Bucket], int]
"""Bytes that the graph of a bucket is expected to take."""


class Predictor:
    """Predicts the graphs of one phase in proportion to their new tokens (`Bucket.tokens`).

    HabanaAI's fork takes the mean bytes a token of all graphs so far. This predictor takes the larger one of that mean
    and of the largest graph's bytes a token: the mean is enough where graphs have a fixed part, and too little where
    attention makes them grow faster than their tokens. It never says less than a graph of no more tokens took. So a
    prediction grows with the tokens (monotone), and is at least what was measured.

    Before the first measurement it says what `expected` does, or 0 without one. `add` and a prediction take
    O(log n) comparisons.
    """

    def __init__(self, expected: SizeOf | None = None) -> None:
        self._expected = expected
        self._tokens = self._bytes = 0
        self._largest = (0, 0)
        self._at: list[int] = []
        self._held: list[int] = []

    def __call__(self, bucket: Bucket) -> int:
        """Bytes that the bucket's graph should take."""
        if not self._tokens:
            return self._expected(bucket) if self._expected is not None else 0
        mean = -(-self._bytes * bucket.tokens // self._tokens)
        tokens, size = self._largest
        place = bisect_right(self._at, bucket.tokens)
        return max(mean, -(-size * bucket.tokens // tokens), self._held[place - 1] if place else 0)

    def add(self, bucket: Bucket, size: int) -> None:
        """The bucket's graph took `size` bytes."""
        tokens = bucket.tokens
        self._tokens += tokens
        self._bytes += size
        self._largest = max(self._largest, (tokens, size))
        place = bisect_right(self._at, tokens)
        if place and self._held[place - 1] >= size:
            return
        end = place
        while end < len(self._at) and self._held[end] <= size:
            end += 1
        self._at[place:end] = [tokens]
        self._held[place:end] = [size]
