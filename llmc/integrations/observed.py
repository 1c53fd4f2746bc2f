"""Recorded traffic as a server's steps, from any record: requests, lengths by interval, or the steps themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from llmc.buckets.bucket import PHASES
from llmc.buckets.plan import Fact
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.formats import create, recognise
from llmc.buckets.traffic.formats.base import Fields, StepFormat
from llmc.buckets.traffic.length_histogram import LOW_AND_HIGH, End
from llmc.buckets.traffic.source import Traffic
from llmc.buckets.traffic.step_histogram import StepHistogram
from llmc.buckets.traffic.timestamps import DAY, Period
from llmc.buckets.traffic.trace_file import TraceFile
from llmc.errors import InputError
from llmc.integrations.base import BucketRules, Demands, GraphDemand, Setup, collect

SPELLED = {"blocks": "context blocks"}
"""Axes that step logs spell differently from the server families."""


MOST_KEPT = 100_000
"""Most requests that are kept for shifts of the traffic; of a longer trace, the first ones."""


@dataclass(frozen=True)
class TrafficSource:
    """A file of recorded traffic, with the options of `Traffic`. `progress`: (bytes read, total bytes)."""

    path: str
    arrival_rate: float | None = None
    clip: bool = False
    format: str | None = None
    fields: Fields | None = None
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class ObservedSteps:
    """The steps that a server takes, or took, for recorded traffic.

    demands   by family and shape
    requests  the first MOST_KEPT requests, empty for a log of steps
    ends      the same with all lengths at the low and at the high end of their intervals, where only these are known
    facts     the input, for a plan's provenance
    counts    requests admitted, left out and clipped
    notes     sentences on skipped or differently counted contents
    period    the time of the requests; None for a log of steps
    """

    demands: Demands
    requests: tuple[TrafficRequest, ...]
    ends: tuple[Demands, ...]
    facts: Mapping[str, Fact]
    counts: Mapping[str, int]
    notes: tuple[str, ...]
    period: Period | None = None


def observe(server: BucketRules, setup: Setup, source: TrafficSource) -> ObservedSteps:
    """Return the steps of `server` for the traffic in `source`; a log of steps is used unchanged.

    Raises InputError where the file cannot be read, or counts steps by other axes than the server's graphs.
    """
    file, reported = TraceFile(source.path), source.progress
    format_ = None
    if source.format is not None:
        format_ = create(source.format)
    elif not source.fields:
        format_ = recognise(file)
    if isinstance(format_, StepFormat):
        lines = file.lines(None if reported is None else lambda done: reported(done, file.size))
        return _of_steps(server, setup, source.path, format_.steps(source.path, lines))
    kept: list[TrafficRequest] = []

    def keeping(requests: Iterator[TrafficRequest]) -> Iterator[TrafficRequest]:
        for request in requests:
            if len(kept) < MOST_KEPT:
                kept.append(request)
            yield request

    def demands(traffic: Traffic, requests: Iterator[TrafficRequest]) -> Demands:
        return collect(server.demands(setup, requests, traffic.step_time))

    traffic = _traffic(source)
    found = demands(traffic, keeping(traffic.requests(setup.limits)))
    ends: tuple[Demands, ...] = ()
    if traffic.uncertain:
        others = [_traffic(source, end) for end in LOW_AND_HIGH]
        ends = tuple(demands(other, other.requests(setup.limits)) for other in others)
    period = traffic.period()
    facts = {"traffic": Path(source.path).name, "period": str(period), **traffic.facts()}
    return ObservedSteps(found, tuple(kept), ends, facts, traffic.counts(), tuple(traffic.notes()), period)


def _traffic(source: TrafficSource, end: End = "middle") -> Traffic:
    return Traffic(
        source.path, source.arrival_rate, clip=source.clip, format=source.format, fields=source.fields, end=end,
        progress=source.progress,
    )  # fmt: skip


class Part(NamedTuple):
    """A part of recorded traffic: its `name`, its number of `requests`, and their steps."""

    name: str
    requests: int
    demands: Demands


def parts(server: BucketRules, setup: Setup, source: TrafficSource, observed: ObservedSteps) -> list[Part]:
    """Return the steps of the first half of the traffic, and of each later part of it, from another pass.

    Of a trace of two days or more, a part is a day, and the first half of the days are one part. A shorter one is split
    in the middle of its requests. Empty where there is no order of requests: a log of steps, lengths by interval, and
    fewer than two requests.
    """
    admitted, period = observed.counts.get("admitted", 0), observed.period
    if period is None or observed.ends or admitted < 2:
        return []
    by_day = source.arrival_rate is None and period.seconds >= 2 * DAY
    half = (period.day(period.seconds) + 1) // 2 if by_day else admitted // 2

    def key(numbered: tuple[int, TrafficRequest]) -> int:
        number, request = numbered
        unit = period.day(request.time) if by_day else number
        return -1 if unit < half else unit if by_day else half

    traffic = _traffic(source)
    counts: Counter[int] = Counter()

    def counted(unit: int, group: Iterator[tuple[int, TrafficRequest]]) -> Iterator[TrafficRequest]:
        for _, request in group:
            counts[unit] += 1
            yield request

    found = []
    for unit, group in groupby(enumerate(traffic.requests(setup.limits)), key):
        demands = collect(server.demands(setup, counted(unit, group), traffic.step_time))
        name = "the first half" if unit < 0 else period.date(unit) if by_day else "the second half"
        found.append(Part(name, counts[unit], demands))
    return found


def _of_steps(server: BucketRules, setup: Setup, path: str, found: StepHistogram) -> ObservedSteps:
    demands = collect(_counted(server, setup, found))
    if not demands:
        families = "; ".join(f"{family.name}: {', '.join(family.axes)}" for family in server.families)
        raise InputError(
            f"{path}: counts steps by {', '.join(found.axes)}, and the graphs of {server.name} are of {families}; give "
            "requests, or a log of this server"
        )
    notes = list(found.notes)
    if found.padded:
        notes.append(f"{path}: has only sizes after padding, so the padding of its own graphs is not included")
    if found.counted == "misses":
        notes.append(f"{path}: has only steps that no graph covered; plan with traffic that has all of them")
    facts: dict[str, Fact] = {"traffic": Path(path).name, "steps": found.steps}
    return ObservedSteps(demands, (), (), facts, {"steps": found.steps}, tuple(notes))


def _counted(server: BucketRules, setup: Setup, found: StepHistogram) -> Iterator[GraphDemand]:
    """Each step for every family whose axes the log has, with the work of a graph of exactly its size."""
    axes = [SPELLED.get(axis, axis) for axis in found.axes]
    for family in server.families:
        if not set(family.axes) <= set(axes):
            continue
        indices = [axes.index(axis) for axis in family.axes]
        for key, count in found.counts.items():
            if key.phase == "any" or family.name not in PHASES or family.name == key.phase:
                shape = tuple(key.shape[index] for index in indices)
                yield GraphDemand(family.name, shape, count, server.work(setup, family.name, shape) * count)
