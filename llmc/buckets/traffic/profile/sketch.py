"""The distribution of many lengths in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate


class LengthSketch:
    """Lengths counted exactly below 2^bits, and from there on rounded down by less than 1 part in 2^(bits − 1)."""

    def __init__(self, bits: int = 10) -> None:
        self._bits = bits
        self.counts: Counter[int] = Counter()
        self.total = 0
        self.longest = 0

    def add(self, length: int, times: int = 1) -> None:
        """Count `length` so often."""
        unit = max(0, length.bit_length() - self._bits)
        self.counts[length >> unit << unit] += times
        self.total += length * times
        self.longest = max(self.longest, length)

    def merge(self, other: LengthSketch) -> None:
        """Count what `other`, of as many bits, counted."""
        self.counts.update(other.counts)
        self.total += other.total
        self.longest = max(self.longest, other.longest)

    @property
    def number(self) -> int:
        """Lengths counted."""
        return self.counts.total()

    @property
    def mean(self) -> float | None:
        """The mean length, exact; None without lengths."""
        number = self.number
        return self.total / number if number else None

    def percentiles(self, percents: Sequence[float]) -> list[int | None]:
        """For each, the least length that so many percent of all do not exceed; None without lengths."""
        lengths = sorted(self.counts)
        sums = list(accumulate(self.counts[length] for length in lengths))
        if not sums:
            return [None for _ in percents]
        found: list[int | None] = []
        for percent in percents:
            rank = max(1, -(-sums[-1] * percent // 100))
            found.append(self.longest if rank >= sums[-1] else lengths[bisect_right(sums, rank - 1)])
        return found


def distance(one: LengthSketch, other: LengthSketch) -> float:
    """How far apart two distributions are: the largest difference of their cumulative shares, 0 to 1 (Kolmogorov)."""
    numbers = one.number, other.number
    if not all(numbers):
        return 0.0
    shares = [0.0, 0.0]
    largest = 0.0
    for length in sorted(one.counts.keys() | other.counts.keys()):
        for place, sketch in enumerate((one, other)):
            shares[place] += sketch.counts.get(length, 0) / numbers[place]
        largest = max(largest, abs(shares[0] - shares[1]))
    return largest
