"""Lengths that are known by interval only, as a server's histograms tell them, and requests drawn from them.

A histogram's bucket says how many requests were longer than one bound and at most as long as the next. What a plan
pads on them depends on where in the interval they are. So requests are drawn three times: all at the low end, all at
the high end, and spread over the interval so that their mean is the histogram's own; an evaluation of each gives the
padding and how uncertain it is.
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
"""Where in their intervals lengths are drawn."""

ENDS: tuple[End, ...] = ("low", "middle", "high")

EMBED_LM_HEAD: tuple[End, End] = ("low", "high")
"""The two whose padding says how uncertain that of the middle is."""

MAX_DRAWN = 100_000
"""Requests that are drawn at most; of more of them, each stands for several."""

STRIDES = (0.7548776662466927, 0.5698402909980532)
"""Steps of the prompts and of the outputs through their distributions: any two lengths meet as often as chance has it.

They are 1/p and 1/p² of the root p of p³ = p + 1: M. Roberts, "The Unreasonable Effectiveness of Quasirandom
Sequences", 2018.
"""


class Interval(NamedTuple):
    """`number` lengths from `low` to `high` tokens, both included; `high` is None where there is no upper bound."""

    low: int
    high: int | None
    number: int


@dataclass(frozen=True)
class LengthHistogram:
    """Lengths by interval, ascending and apart, and `total`, the sum of all lengths, where it is known."""

    intervals: tuple[Interval, ...]
    total: int | None = None

    @staticmethod
    def of(cumulative: Mapping[float, float], total: float | None, where: str) -> LengthHistogram:
        """The histogram of Prometheus' buckets: upper bound (inclusive) to how many lengths are at most that.

        Raises InputError, beginning with `where`, for counts that fall or are no counts, and without +Inf.
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
        """Lengths in all."""
        return sum(interval.number for interval in self.intervals)

    @property
    def mean(self) -> float | None:
        """The mean length, where the sum is known."""
        return None if self.total is None or not self.number else self.total / self.number

    def closed(self, limit: int | None = None) -> tuple[tuple[int, int, int], ...]:
        """(low, high, count) of each interval; none goes beyond `limit`.

        An interval without an upper bound ends at `limit`, without one at twice its lower bound; and where the sum of
        all lengths is known, not above what its lengths are on average if all others have their least ones.
        """
        found = []
        for low, high, count in self.intervals:
            last = self._last(low, count, limit) if high is None else high
            found.append((low, last if limit is None else max(low, min(last, limit)), count))
        return tuple(found)

    def _last(self, low: int, count: int, limit: int | None) -> int:
        """Where the interval without an upper bound ends."""
        last = 2 * low if limit is None else limit
        if self.total is None:
            return last
        others = sum(one.low * one.number for one in self.intervals[:-1])
        return max(low, min(last, (self.total - others) // count))

    def at(self, percent: float) -> Interval:
        """The interval of the least length that so many percent of all do not exceed; there is at least one length."""
        rank = max(1, -(-self.number * percent // 100))
        for interval in self.intervals:
            rank -= interval.number
            if rank <= 0:
                break
        return interval

    def drawn(self, number: int, end: End, limit: int | None = None) -> list[int]:
        """`number` lengths, ascending: those at evenly spaced places of the distribution.

        Within an interval they are at its `end`; "middle" spreads them over it, more to that side which brings their
        mean to the histogram's.
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
        """The power of evenly spaced parts of an interval that brings the mean of all to the histogram's.

        Parts u from 0 to 1 raised to a have the mean 1 / (1 + a).
        """
        least = sum(low * count for low, _, count in closed)
        width = sum((high - low) * count for low, high, count in closed)
        if self.total is None or not width:
            return 1.0
        share = min(0.98, max(0.02, (self.total - least) / width))
        return 1 / share - 1


@dataclass(frozen=True)
class Lengths:
    """Histograms of the prompt and output lengths of some requests, seen for `duration` seconds where that is known."""

    prompt: LengthHistogram
    output: LengthHistogram
    duration: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """Requests in all."""
        return self.prompt.number

    def draw(
        self, end: End = "middle", longest_prompt: int | None = None, longest_total: int | None = None
    ) -> Iterator[TrafficRequest]:
        """Requests of these lengths, at most MAX_DRAWN, the same each time; evenly spaced over `duration`.

        Which prompt came with which output is not known: lengths are paired as if neither told of the other. The
        limits, in tokens, end the intervals that have no end of their own.
        """
        number = min(self.requests, MAX_DRAWN)
        prompts = self.prompt.drawn(number, end, longest_prompt)
        outputs = self.output.drawn(number, end, longest_total)
        first, second = (_stride(number, share) for share in STRIDES)
        gap = 0.0 if self.duration is None else self.duration / max(1, number)
        for index in range(number):
            yield TrafficRequest(index * gap, prompts[index * first % number], outputs[index * second % number])


def _stride(number: int, share: float) -> int:
    """About `share` of `number`, without a common divisor, so that its multiples meet every place once."""
    stride = max(1, round(number * share))
    while math.gcd(stride, number) != 1:
        stride += 1
    return stride
