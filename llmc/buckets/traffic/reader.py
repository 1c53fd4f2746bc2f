"""Trace files: a stream of requests in time order, from any format (formats/).

llmc's own format is in recording.py. Properties of other formats:

- BurstGPT's failed requests have 0 response tokens; they are skipped
- Mooncake's "hash_ids", the blocks of 512 prompt tokens that may be found in the cache, are ignored: each prompt
  counts as new
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop
from typing import NoReturn

from llmc.buckets.render.text import counted
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.formats import FIELDS, create, recognise
from llmc.buckets.traffic.formats.base import Fields, Format, FoundRows, LengthFormat, RequestFormat
from llmc.buckets.traffic.length_histogram import End, Lengths
from llmc.buckets.traffic.rows import Rows, shown
from llmc.buckets.traffic.timestamps import Clock, Moment, clock_from, moment
from llmc.buckets.traffic.trace_file import Progress, TraceFile
from llmc.errors import InputError

REORDERED = 1024

_Read = tuple[float, int, int, int]
"""Seconds, prompt, output and cached tokens."""


@dataclass(frozen=True)
class TraceSummary:
    """Totals of one pass over a trace; tokens are sums over its requests.

    `duration` is the seconds from the first request to the last, `rate` the mean arrival rate in requests per second,
    (requests − 1) / duration. Both are None for a trace without times, and `rate` also when all arrive at once.
    """

    requests: int
    skipped_empty: int
    out_of_order: int
    duration: float | None
    rate: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    longest_prompt: int
    longest_output: int
    longest_total: int


class Trace:
    """The requests of a trace file, streamed: each iteration reads the file again, in memory independent of its size.

    `format` names one of `formats.FORMATS`; without it, the file's beginning decides. `fields` are the names of a
    request's values in a log without known names (formats/fields.py). Requests are sorted by time within a window of
    REORDERED consecutive ones in the file, since servers record a request when it ends; one that is later still gets
    the time of the previous one. The first is at second 0. Requests without a prompt or without output (failed ones)
    are skipped. A prompt that was wholly in the cache still has its last token computed.

    Texts to embed or score (`generates` False) have no output, and count without. From a file of histograms, requests
    are drawn at the `end` of their intervals (length_histogram.py).

    path           the file's path
    size           bytes of the file as stored
    format         the file's format
    lengths        the histograms of a file without requests, else None
    has_times      whether the trace has arrival times; without, all times are 0
    start          the moment of second 0, as far as the trace records it, once iteration has begun
    skipped_empty  requests skipped so far by the latest iteration
    out_of_order   requests whose time was raised so far by the latest iteration

    The constructor raises InputError, naming the file and where known line and column, for a file that cannot be read,
    is in no known format or has no requests. Iteration raises it for a line that is damaged or lacks a value, a length
    that is not a whole number from 0 to 2^31 − 1, more cached than prompt tokens, times of several kinds, and a trace
    without a request.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002 - as on the command line
        fields: Fields | None = None,
        end: End = "middle",
        progress: Progress | None = None,
        generates: bool = True,
    ) -> None:
        self._generates = generates
        self._file = TraceFile(path)
        self._progress = progress
        self._fields = fields or {}
        self._end = end
        self.path = self._file.path
        self._name = str(self.path)
        self.size = self._file.size
        self.skipped_empty = 0
        self.out_of_order = 0
        self.start: Moment | None = None
        self.format = self._format(format)
        self.lengths: Lengths | None = None
        self._longest: tuple[int | None, int | None] = (None, None)
        self._notes: list[str] = []
        if isinstance(self.format, RequestFormat):
            self.has_times = self._rows(self.format, None).time_column is not None
        elif isinstance(self.format, LengthFormat):
            self.lengths = self.format.lengths(self._file)
            self.has_times = self.lengths.duration is not None
        else:
            raise InputError(
                f"{self._name}: is a {self.format.title}, which counts steps and records no requests; look at it with "
                "llmc traffic show, and plan from a log of requests or from the histograms of /metrics"
            )

    def __iter__(self) -> Iterator[TrafficRequest]:
        """Yield the requests in time order within a window of REORDERED."""
        self.skipped_empty = self.out_of_order = 0
        if self.lengths is not None:
            yield from self.lengths.draw(self._end, *self._longest)
            return
        first: float | None = None
        time = 0.0
        for now, prompt, output, cached in _by_time(self._in_file_order()):
            if first is None:
                first = now
                if self.start is not None:
                    self.start = self.start._replace(seconds=self.start.seconds + now)
            if now - first < time:
                self.out_of_order += 1
            time = max(time, now - first)
            yield TrafficRequest(time, prompt, output, cached)

    def limit(self, longest_prompt: int, longest_total: int) -> None:
        """End the intervals of histograms at these lengths, where they have no end or a later one."""
        self._longest = (longest_prompt, longest_total)

    def notes(self) -> list[str]:
        """Return the format's notes on the latest complete iteration, or on its histograms."""
        return list(self._notes if self.lengths is None else self.lengths.notes)

    def counted(self) -> list[str]:
        """Return sentences on requests that the latest complete iteration skipped or changed."""
        found = self.notes()
        if self.skipped_empty:
            found.append(f"left out: {counted(self.skipped_empty, 'request')} without a prompt or without output")
        if self.out_of_order:
            found.append(f"{self.out_of_order} requests are far out of order, and get the time of the previous one")
        return found

    def _in_file_order(self) -> Iterator[_Read]:
        """Seconds since the first line's time, prompt, output and cached tokens of each request."""
        if not isinstance(self.format, RequestFormat):
            return
        rows = self._rows(self.format, self._progress)
        clock: Clock | None = None
        now = 0.0
        found = False
        for stamp, prompt, output, cached in rows:
            if prompt == 0 or (output == 0 and self._generates):
                self.skipped_empty += 1
                continue
            if cached > prompt:
                self._fail(rows, f"{cached} cached tokens of a prompt of {prompt}; correct or remove the line")
            if rows.time_column is not None:
                try:
                    if clock is None:
                        clock = clock_from(stamp, rows.time_unit)
                        self.start = _start(rows, stamp)
                    now = clock(stamp)
                except ValueError as error:
                    self._fail(rows, f"{shown(stamp)} {error}; correct or remove the line", rows.time_column)
            found = True
            yield now, prompt, output, cached if cached < prompt else prompt - 1
        self._notes = rows.notes if isinstance(rows, FoundRows) else []
        if not found:
            raise InputError(
                f"{self._name}: the trace has no request with a prompt and output ({self.skipped_empty} without); "
                "give one with at least one"
            )

    def digest(self) -> str:
        """Return the SHA-256 of the file as stored, in hexadecimal. Raises InputError when it cannot be read."""
        return self._file.digest()

    def summary(self) -> TraceSummary:
        """Return counts and sums from one pass over the file. Raises InputError like iteration."""
        requests = prompts = outputs = cached = 0
        longest_prompt = longest_output = longest_total = 0
        request = TrafficRequest(0.0, 1, 1)
        for request in self:
            requests += 1
            prompts += request.prompt
            outputs += request.output
            cached += request.cached
            longest_prompt = max(longest_prompt, request.prompt)
            longest_output = max(longest_output, request.output)
            longest_total = max(longest_total, request.prompt + request.output)
        duration = request.time if self.has_times else None
        return TraceSummary(
            requests=requests,
            skipped_empty=self.skipped_empty,
            out_of_order=self.out_of_order,
            duration=duration,
            rate=(requests - 1) / duration if duration else None,
            prompt_tokens=prompts,
            output_tokens=outputs,
            cached_tokens=cached,
            longest_prompt=longest_prompt,
            longest_output=longest_output,
            longest_total=longest_total,
        )

    def _format(self, name: str | None) -> Format:
        if name is None and not self._fields:
            return recognise(self._file)
        if self._fields and name not in (None, FIELDS):
            raise InputError(f"the format {name} knows its fields: leave out --fields, or --traffic-format {name}")
        return create(name or FIELDS)

    def _rows(self, format_: RequestFormat, progress: Progress | None) -> Rows:
        return format_.rows(self._name, self._file.lines(progress), self._fields)

    def _fail(self, rows: Rows, reason: str, column: str | None = None) -> NoReturn:
        location = f"line {rows.line}" if column is None else f"line {rows.line}, column {column!r}"
        raise InputError(f"{self._name}: {location}: {reason}") from None


def _start(rows: Rows, stamp: object) -> Moment:
    if isinstance(rows, FoundRows) and rows.kind is not None and isinstance(stamp, float):
        return Moment(stamp, rows.kind)
    return moment(stamp)


def _by_time(requests: Iterable[_Read]) -> Iterator[_Read]:
    """`requests` in time order within a window of REORDERED; equal times keep their order."""
    waiting: list[tuple[float, int, _Read]] = []
    for index, request in enumerate(requests):
        if len(waiting) < REORDERED:
            heappush(waiting, (request[0], index, request))
        else:
            yield heappushpop(waiting, (request[0], index, request))[2]
    while waiting:
        yield heappop(waiting)[2]
