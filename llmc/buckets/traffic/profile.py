"""The profile of a trace, from one pass in bounded memory: length distributions, in total and over time."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.events import DecodeRun, TrafficRequest
from llmc.buckets.traffic.schedule import schedule
from llmc.buckets.traffic.step_time import AssumedStepTime


class LengthSketch:
    """Lengths counted exactly below 2^bits, and from there on rounded down by less than 1 part in 2^(bits − 1)."""

    def __init__(self, bits: int = 10) -> None:
        self._bits = bits
        self.counts: Counter[int] = Counter()
        self.total = 0
        self.longest = 0

    def add(self, length: int, times: int = 1) -> None:
        """Count `length` `times` times."""
        unit = max(0, length.bit_length() - self._bits)
        self.counts[length >> unit << unit] += times
        self.total += length * times
        self.longest = max(self.longest, length)

    def merge(self, other: LengthSketch) -> None:
        """Add the counts of `other`, which has the same number of bits."""
        self.counts.update(other.counts)
        self.total += other.total
        self.longest = max(self.longest, other.longest)

    @property
    def number(self) -> int:
        """Number of counted lengths."""
        return self.counts.total()

    @property
    def mean(self) -> float | None:
        """The mean length, exact; None without lengths."""
        number = self.number
        return self.total / number if number else None

    def percentiles(self, percents: Sequence[float]) -> list[int | None]:
        """Return, for each, the least length that `percent` of all do not exceed; None without lengths."""
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
    """Return the largest difference of two distributions' cumulative shares, 0 to 1 (Kolmogorov)."""
    numbers = one.number, other.number
    if not all(numbers):
        return 0.0
    shares = [0.0, 0.0]
    largest = 0.0
    for length in sorted(one.counts.keys() | other.counts.keys()):
        for index, sketch in enumerate((one, other)):
            shares[index] += sketch.counts.get(length, 0) / numbers[index]
        largest = max(largest, abs(shares[0] - shares[1]))
    return largest


MOST = 64
"""Most windows kept; beyond it, each pair is merged into one of twice the length."""

BITS = 7
"""Bits of a window's sketches: lengths are within 1 part in 64."""


def _sketch() -> LengthSketch:
    return LengthSketch(BITS)


@dataclass
class Window:
    """The requests that arrived within `seconds` from `start` on."""

    start: float
    seconds: float
    prompt: LengthSketch = field(default_factory=_sketch)
    output: LengthSketch = field(default_factory=_sketch)

    @property
    def requests(self) -> int:
        """Number of requests that arrived in it."""
        return self.prompt.number

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    def merge(self, other: Window) -> None:
        """Add the requests of the next window."""
        self.seconds += other.seconds
        self.prompt.merge(other.prompt)
        self.output.merge(other.output)


class Windows:
    """Consecutive windows of equal length; requests come in time order."""

    def __init__(self) -> None:
        self._seconds = 1.0
        self._found: dict[int, Window] = {}
        self._last = 0.0

    def add(self, request: TrafficRequest) -> None:
        """Count a request."""
        index = int(request.time / self._seconds)
        while index >= MOST:
            self._double()
            index = int(request.time / self._seconds)
        self._last = request.time
        window = self._window(self._found, index)
        window.prompt.add(request.prompt)
        window.output.add(request.output)

    def _double(self) -> None:
        self._seconds *= 2
        joined: dict[int, Window] = {}
        for index, window in self._found.items():
            into = self._window(joined, index // 2)
            into.prompt.merge(window.prompt)
            into.output.merge(window.output)
        self._found = joined

    def _window(self, among: dict[int, Window], index: int) -> Window:
        if index not in among:
            among[index] = Window(index * self._seconds, self._seconds)
        return among[index]

    def found(self, most: int) -> list[Window]:
        """Return at most `most` windows of equal length, including empty ones; the last ends with the last request."""
        if not self._found:
            return []
        number = max(self._found) + 1
        each = -(-number // most)
        found = []
        for first in range(0, number, each):
            joined = Window(first * self._seconds, 0.0)
            for index in range(first, min(first + each, number)):
                joined.merge(self._found.get(index) or Window(index * self._seconds, self._seconds))
            found.append(joined)
        if self._last > found[-1].start:
            found[-1].seconds = self._last - found[-1].start
        return found


def drift(windows: list[Window]) -> tuple[float, float]:
    """Return the largest distance of any window's lengths from those of all, 0 to 1: of prompts, and of outputs."""
    whole = Window(0.0, 1.0)
    for window in windows:
        whole.merge(window)
    return (
        max((distance(window.prompt, whole.prompt) for window in windows), default=0.0),
        max((distance(window.output, whole.output) for window in windows), default=0.0),
    )


MAX_WINDOWS = 32
"""Most windows of a profile."""

LONGEST = 1 << 32
"""Above every sequence that a trace can hold."""


@dataclass(frozen=True)
class Profile:
    """Characteristics of a trace.

    prompt, output, total   lengths in tokens; total is prompt and output of a request together
    cached                  share of the prompts' tokens that were in the cache
    duration                seconds from the first request to the last; None for a trace without times
    running                 decode steps by number of sequences, on a simulated server (`schedule`,
                            `AssumedStepTime`) with `slots`; None for a trace without times
    windows                 the trace by time windows; empty for a trace without times
    """

    prompt: LengthSketch
    output: LengthSketch
    total: LengthSketch
    cached: float
    duration: float | None
    running: LengthSketch | None
    slots: int
    windows: list[Window]

    @property
    def requests(self) -> int:
        """Total number of requests."""
        return self.prompt.number

    @property
    def rate(self) -> float | None:
        """The mean arrival rate in requests per second, (requests − 1) / duration."""
        return (self.requests - 1) / self.duration if self.duration else None


def profile(requests: Iterable[TrafficRequest], *, has_times: bool, slots: int = 256) -> Profile:
    """Return the profile of `requests`, which are in time order; memory does not grow with their number."""
    prompt, output, total, windows = LengthSketch(), LengthSketch(), LengthSketch(), Windows()
    last = cached = 0.0

    def counted() -> Iterator[TrafficRequest]:
        nonlocal last, cached
        for request in requests:
            prompt.add(request.prompt)
            output.add(request.output)
            total.add(request.prompt + request.output)
            cached += request.cached
            last = request.time
            if has_times:
                windows.add(request)
            yield request

    running = LengthSketch() if has_times else None
    if running is None:
        for _ in counted():
            pass
    else:
        for event in schedule(counted(), Limits(LONGEST, slots), step_time=AssumedStepTime()):
            if isinstance(event, DecodeRun):
                running.add(event.batch, event.steps)
    return Profile(
        prompt=prompt,
        output=output,
        total=total,
        cached=cached / prompt.total if prompt.total else 0.0,
        duration=last if has_times else None,
        running=running,
        slots=slots,
        windows=windows.found(MAX_WINDOWS),
    )
