"""Recorded traffic as a server's steps, from any record: requests, lengths by interval, or the steps themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from llmc.buckets.bucket import PHASES
from llmc.buckets.plan import Fact
from llmc.buckets.traffic.formats import create, recognise
from llmc.buckets.traffic.formats.base import Fields, StepFormat
from llmc.buckets.traffic.length_histogram import EMBED_LM_HEAD
from llmc.buckets.traffic.source import Traffic
from llmc.buckets.traffic.step_histogram import StepHistogram
from llmc.buckets.traffic.trace_file import TraceFile
from llmc.errors import InputError
from llmc.integrations.base import BucketRules, Demands, GraphDemand, Setup, collect

SPELLED = {"blocks": "context blocks"}
"""Axes that step logs spell differently from the server families."""


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

    demands  by family and shape
    ends     the same with all lengths at the low and at the high end of their intervals, where only these are known
    facts    the input, for a plan's provenance
    counts   requests admitted, left out and clipped
    notes    sentences on skipped or differently counted contents
    """

    demands: Demands
    ends: tuple[Demands, ...]
    facts: Mapping[str, Fact]
    counts: Mapping[str, int]
    notes: tuple[str, ...]


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
    read = partial(
        Traffic, source.path, source.arrival_rate, clip=source.clip, format=source.format, fields=source.fields,
        progress=reported,
    )  # fmt: skip

    def demands(traffic: Traffic) -> Demands:
        return collect(server.demands(setup, traffic.requests(setup.limits), traffic.step_time))

    traffic = read(end="middle")
    found = demands(traffic)
    ends = tuple(demands(read(end=end)) for end in EMBED_LM_HEAD) if traffic.uncertain else ()
    return ObservedSteps(found, ends, traffic.facts(), traffic.counts(), tuple(traffic.notes()))


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
    return ObservedSteps(demands, (), {"steps": found.steps}, {"steps": found.steps}, tuple(notes))


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
