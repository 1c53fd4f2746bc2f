"""Traffic of any kind, looked at: its text, its JSON, and what plots draw of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmc.buckets.report import traffic_text
from llmc.buckets.traffic.formats import FIELDS, create, recognise
from llmc.buckets.traffic.formats.base import Fields, StepFormat
from llmc.buckets.traffic.length_histogram import Lengths
from llmc.buckets.traffic.profile import Profile, profile
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.step_histogram import StepHistogram
from llmc.buckets.traffic.trace_file import TraceFile

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


@dataclass(frozen=True)
class View:
    """`what` was found in a file of the named format, as text that ends in a newline, and as a JSON document."""

    format: str
    what: Profile | Lengths | StepHistogram
    text: str
    document: dict[str, Any]
    notes: tuple[str, ...] = ()


def view(
    traffic: str | os.PathLike[str] | Lengths,
    *,
    format: str | None = None,  # noqa: A002 - as on the command line
    fields: Fields | None = None,
    slots: int = 256,
    progress: Progress | None = None,
) -> View:
    """What is in a file, whatever its kind, or in histograms that were sampled. Raises InputError as its format does.

    `slots` are those of the simulated server that tells how many requests run at once (`profile`).
    """
    if isinstance(traffic, Lengths):
        return _of_lengths("prometheus", traffic)
    file = TraceFile(traffic)
    known = create(format) if format is not None else create(FIELDS) if fields else recognise(file)
    if isinstance(known, StepFormat):
        read = None if progress is None else lambda done: progress(done, file.size)
        found = known.steps(str(file.path), file.lines(read))
        return View(known.name, found, traffic_text.steps_text(found), traffic_text.steps_json(found), found.notes)
    trace: Trace = Trace(
        traffic,
        format=known.name,
        fields=fields,
        progress=None if progress is None else lambda done: progress(done, trace.size),
    )
    if trace.lengths is not None:
        return _of_lengths(known.name, trace.lengths)
    seen = profile(trace, has_times=trace.has_times, slots=slots)
    return View(
        known.name, seen, traffic_text.profile_text(seen), traffic_text.profile_json(seen), tuple(trace.counted())
    )


def _of_lengths(name: str, found: Lengths) -> View:
    return View(name, found, traffic_text.lengths_text(found), traffic_text.lengths_json(found), found.notes)
