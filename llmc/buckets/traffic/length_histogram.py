"""Lengths that are known only by interval, as in a server's histograms, and requests drawn from them.

A histogram's bucket counts the requests longer than one bound and at most as long as the next. The padding of a plan
depends on their exact lengths. Requests are therefore drawn three times: all at the low end, all at the high end, and
spread over the interval so that their mean is the histogram's own. Evaluating each gives the padding and its
uncertainty.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from llmc.buckets.traffic.events import TrafficRequest
from llmc.errors import InputError

End = Literal["low", "middle", "high"]
"""Position in its interval at which a length is drawn."""

ENDS: tuple[End, ...] = ("low", "middle", "high")

LOW_AND_HIGH: tuple[End, End] = ("low", "high")
"""The two ends whose padding gives the uncertainty of the middle's."""

MAX_DRAWN = 100_000
"""Most requests drawn; beyond it, each stands for several."""

STRIDES = (0.7548776662466927, 0.5698402909980532)
"""Steps of the prompts and of the outputs through their distributions, which pair any two lengths as often as chance.

They are 1/p and 1/p² of the root p of p³ = p + 1: M. Roberts, "The Unreasonable Effectiveness of Quasirandom
Sequences", 2018.
"""


class Interval(NamedTuple):
    """`number` lengths from `low` to `high` tokens, inclusive; `high` is None where there is no upper bound."""

    low: int
    high: int | None
    number: int


@dataclass(frozen=True)
class LengthHistogram:
    """Lengths by ascending, disjoint intervals, and `total`, the sum of all lengths, where known."""

    intervals: tuple[Interval, ...]
    total: int | None = None

    @staticmethod
    def of(cumulative: Mapping[float, float], total: float | None, where: str) -> LengthHistogram:
        """Create the histogram from Prometheus' buckets: upper bound (inclusive) → number of lengths up to it.

        Raises InputError, beginning with `where`, for counts that fall or are invalid, and without +Inf.
        """
        if math.inf not in cumulative:
            raise InputError(
                f'{where}: the histogram has no bucket le="+Inf", so that its longest lengths are not counted; '
                "keep that series when you scrape, relabel or query"
            )
        intervals: list[Interval] = []
        below, before, before_bound = 0, 0, 0.0
        for bound in sorted(cumulative):
            count = round(cumulative[bound])
            if count < before:
                raise InputError(
                    f"{where}: {count} lengths are at most {bound:g}, but {before} at most {before_bound:g}; "
                    "such counts do not fall: give the buckets as the server writes them, of one histogram"
                )
            high = None if bound == math.inf else math.floor(bound)
            if count > before:
                intervals.append(Interval(below + 1, None if high is None else max(high, below + 1), count - before))
            below, before, before_bound = below if high is None else max(below, high), count, bound
        return LengthHistogram(tuple(intervals), None if total is None else round(total))

    @property
    def number(self) -> int:
        """Total number of lengths."""
        return sum(interval.number for interval in self.intervals)

    @property
    def mean(self) -> float | None:
        """The mean length, where the sum is known."""
        return None if self.total is None or not self.number else self.total / self.number

    def closed(self, limit: int | None = None) -> tuple[tuple[int, int, int], ...]:
        """Return (low, high, count) of each interval; none goes beyond `limit`.

        An interval without an upper bound ends at `limit`, or at twice its lower bound without one. Where the sum of
        all lengths is known, it also ends at the average of its lengths if all others have their least ones.
        """
        found = []
        for low, high, count in self.intervals:
            last = self._last(low, count, limit) if high is None else high
            found.append((low, last if limit is None else max(low, min(last, limit)), count))
        return tuple(found)

    def _last(self, low: int, count: int, limit: int | None) -> int:
        last = 2 * low if limit is None else limit
        if self.total is None:
            return last
        others = sum(one.low * one.number for one in self.intervals[:-1])
        return max(low, min(last, (self.total - others) // count))

    def at(self, percent: float) -> Interval:
        """Return the interval of the least length that `percent` of all do not exceed; there is at least one length."""
        rank = max(1, -(-self.number * percent // 100))
        for interval in self.intervals:
            rank -= interval.number
            if rank <= 0:
                break
        return interval

    def drawn(self, number: int, end: End, limit: int | None = None) -> list[int]:
        """Return `number` lengths, ascending, at evenly spaced points of the distribution.

        Within an interval they are at its `end`; "middle" spreads them over it, skewed so that their mean is the
        histogram's.
        """
        closed = self.closed(limit)
        sums = list(accumulate(count for *_, count in closed))
        skew = self._skew(closed)
        found = []
        for index in range(number):
            at = (index + 0.5) / number * sums[-1]
            which = min(bisect_right(sums, at), len(sums) - 1)
            low, high, count = closed[which]
            if end == "middle":
                part = min(1.0, max(0.0, (at - sums[which]) / count + 1.0))
                found.append(round(low + (high - low) * part**skew))
            else:
                found.append(low if end == "low" else high)
        return found

    def _skew(self, closed: tuple[tuple[int, int, int], ...]) -> float:
        """The power of evenly spaced fractions of an interval that brings the mean of all to the histogram's.

        Fractions u from 0 to 1 raised to a have the mean 1 / (1 + a).
        """
        least = sum(low * count for low, _, count in closed)
        width = sum((high - low) * count for low, high, count in closed)
        if self.total is None or not width:
            return 1.0
        share = min(0.98, max(0.02, (self.total - least) / width))
        return 1 / share - 1


@dataclass(frozen=True)
class Lengths:
    """Histograms of the prompt and output lengths of some requests, seen for `duration` seconds where known."""

    prompt: LengthHistogram
    output: LengthHistogram
    duration: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """Total number of requests."""
        return self.prompt.number

    def draw(
        self, end: End = "middle", longest_prompt: int | None = None, longest_total: int | None = None
    ) -> Iterator[TrafficRequest]:
        """Yield requests of these lengths, at most MAX_DRAWN, the same each time; evenly spaced over `duration`.

        The pairing of prompts and outputs is unknown, so they are paired as if independent. The limits, in tokens, end
        the intervals that have no end of their own.
        """
        number = min(self.requests, MAX_DRAWN)
        prompts = self.prompt.drawn(number, end, longest_prompt)
        outputs = self.output.drawn(number, end, longest_total)
        first, second = (_stride(number, share) for share in STRIDES)
        gap = 0.0 if self.duration is None else self.duration / max(1, number)
        for index in range(number):
            yield TrafficRequest(index * gap, prompts[index * first % number], outputs[index * second % number])


def _stride(number: int, share: float) -> int:
    """About `share` of `number`, coprime to it, so that its multiples reach every index once."""
    stride = max(1, round(number * share))
    while math.gcd(stride, number) != 1:
        stride += 1
    return stride
