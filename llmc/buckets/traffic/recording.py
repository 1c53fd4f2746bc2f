"""Recordings, llmc's own traffic format: written by a server, or derived from other recordings.

    recording = { record newline }
    record    = {"time": seconds, "prompt_tokens": n, "output_tokens": n [, "cached_tokens": n]}

Lines are JSON. Recordings can be merged, sampled, and anonymised.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop, merge
from itertools import chain
from pathlib import Path
from random import Random
from typing import BinaryIO, Literal, TextIO

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.timestamps import Moment
from llmc.errors import InputError
from llmc.files import writing


def record_line(request: TrafficRequest) -> str:
    """Return one line of a recording, including its newline; a file of such lines is a valid trace.

    `request.time` may count from any moment: a trace's times start at its first request.
    """
    record = {"time": request.time, "prompt_tokens": request.prompt, "output_tokens": request.output}
    if request.cached:
        record["cached_tokens"] = request.cached
    return json.dumps(record) + "\n"


def write(path: str | os.PathLike[str], requests: Iterable[TrafficRequest], *, start: float = 0.0) -> int:
    """Write `requests` as a recording, compressed where the name ends in .gz; return their number.

    `start` is added to the times, which keep microseconds. The file is written atomically: an error of the requests, or
    none of them, keeps the old file. Memory does not grow with the requests. Raises InputError when the file cannot be
    written, and where there is no request.
    """
    number = 0
    with writing(path, "recording") as file, _text(file, Path(path)) as text:
        for request in requests:
            text.write(record_line(request._replace(time=round(start + request.time, 6))))
            number += 1
        if not number:
            raise InputError(f"no request is left to write to {path}; nothing was written")
    return number


@contextmanager
def _text(file: BinaryIO, path: Path) -> Iterator[TextIO]:
    """A text file over `file`; the same requests give the same bytes, also when compressed."""
    if path.suffix.lower() == ".gz":
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed, io.TextIOWrapper(compressed, "utf-8") as text:
            yield text
        return
    plain = io.TextIOWrapper(file, "utf-8")
    try:
        yield plain
    finally:
        plain.detach()


Align = Literal["recorded", "start", "after"]
ALIGNMENTS: tuple[Align, ...] = ("recorded", "start", "after")

MAX_JITTERED = 1 << 18
"""Most requests buffered to sort jittered times."""


@dataclass(frozen=True)
class Merged:
    """Requests in time order from second 0, and that second's time since the epoch, where known."""

    requests: Iterator[TrafficRequest]
    start: float


def merged(traces: Sequence[Trace], align: Align = "recorded") -> Merged:
    """Merge the requests of all `traces` into one stream.

    align     "recorded": each at its own time, which must be of one kind in all; "start": all begin at second 0;
              "after": one after the other, a mean gap between them

    Raises InputError, naming the traces, where their times cannot be related to each other.
    """
    if align == "after":
        return Merged(_after(traces), 0.0)
    opened = [_opened(trace) for trace in traces]
    starts = [trace.start for trace in traces]
    if align == "start":
        return Merged(merge(*opened, key=_time), 0.0)
    first = _comparable(traces, starts)
    shifted = [
        _shifted(requests, 0.0 if start is None else start.seconds - first)
        for requests, start in zip(opened, starts, strict=True)
    ]
    known = starts[0] is not None and starts[0].kind == "utc"
    return Merged(merge(*shifted, key=_time), first if known else 0.0)


def sampled(requests: Iterable[TrafficRequest], share: float, seed: int) -> Iterator[TrafficRequest]:
    """Yield each of `requests` with the probability `share`, above 0 and at most 1, at its own time."""
    if not 0 < share <= 1:
        raise InputError(f"the share {share:g} is out of range; give one above 0 and at most 100%")
    random = Random(seed)  # noqa: S311 - a sample, no secret
    return (request for request in requests if random.random() < share)


def chosen(requests: Iterable[TrafficRequest], number: int, of: int, seed: int) -> Iterator[TrafficRequest]:
    """Yield `number` of the `of` requests, any such choice equally likely, at their own times and in order.

    Knuth, The Art of Computer Programming, 3.4.2, algorithm S.
    """
    if not 0 < number <= of:
        raise InputError(f"{number} of {of} requests cannot be chosen; give a number from 1 to {of}")
    random = Random(seed)  # noqa: S311 - a sample, no secret
    for index, request in enumerate(requests):
        if random.random() * (of - index) < number:
            number -= 1
            yield request


def anonymised(
    requests: Iterable[TrafficRequest], *, round_to: int = 1, jitter: float = 0.0, seed: int | None = None
) -> Iterator[TrafficRequest]:
    """Yield `requests` with lengths rounded up to multiples of `round_to`, and times moved by up to `jitter` seconds.

    Times start at about 0 and stay in order. Without a seed the moves come from the system's randomness, and cannot be
    reversed.
    """
    if round_to < 1:
        raise InputError(f"--round-to {round_to} must be at least 1 token")
    if not 0 <= jitter < math.inf:
        raise InputError(f"a jitter of {jitter} seconds; give 0 or more")
    rounded = (_rounded(request, round_to) for request in requests)
    return rounded if not jitter else _jittered(rounded, jitter, seed)


def _opened(trace: Trace) -> Iterator[TrafficRequest]:
    """The requests of a trace, read far enough to know its start."""
    requests = iter(trace)
    first = next(requests)
    return chain([first], requests)


def _time(request: TrafficRequest) -> float:
    return request.time


def _comparable(traces: Sequence[Trace], starts: Sequence[Moment | None]) -> float:
    """The earliest start. Raises InputError where they are not of one kind, or none has a date."""
    if len(traces) == 1:
        return 0.0 if starts[0] is None else starts[0].seconds
    kinds = [None if start is None else start.kind for start in starts]
    remedy = "let all begin together with --align start, or one after the other with --align after"
    for trace, kind in zip(traces, kinds, strict=True):
        if kind in (None, "relative"):
            raise InputError(f"{trace.path}: its times have no date, so it cannot be merged with others; {remedy}")
        if kind != kinds[0]:
            zones = {"utc": "have a time zone", "local": "have no time zone"}
            raise InputError(
                f"{traces[0].path}: its times {zones[str(kinds[0])]}, and those of {trace.path} {zones[str(kind)]}; "
                f"write both with their zone, {remedy}"
            )
    return min(start.seconds for start in starts if start is not None)


def _shifted(requests: Iterator[TrafficRequest], seconds: float) -> Iterator[TrafficRequest]:
    return (request._replace(time=request.time + seconds) for request in requests)


def _after(traces: Sequence[Trace]) -> Iterator[TrafficRequest]:
    begin = 0.0
    for trace in traces:
        last, number = 0.0, 0
        for request in trace:
            last, number = request.time, number + 1
            yield request._replace(time=begin + last)
        begin += last + (last / (number - 1) if number > 1 else 0.0)


def _rounded(request: TrafficRequest, unit: int) -> TrafficRequest:
    time, prompt, output, cached = request
    longer = -(-prompt // unit) * unit
    return TrafficRequest(time, longer, -(-output // unit) * unit, min(-(-cached // unit) * unit, longer - 1))


def _jittered(requests: Iterable[TrafficRequest], jitter: float, seed: int | None) -> Iterator[TrafficRequest]:
    random = Random(seed)  # noqa: S311 - None seeds from the system
    waiting: list[TrafficRequest] = []
    last = 0.0

    def ordered(request: TrafficRequest) -> TrafficRequest:
        nonlocal last
        last = max(last, request.time)
        return request._replace(time=last)

    for request in requests:
        moved = request._replace(time=max(0.0, request.time + random.uniform(-jitter, jitter)))
        if len(waiting) < MAX_JITTERED:
            heappush(waiting, moved)
        else:
            yield ordered(heappushpop(waiting, moved))
        while waiting and waiting[0].time <= request.time - jitter:
            yield ordered(heappop(waiting))
    while waiting:
        yield ordered(heappop(waiting))
