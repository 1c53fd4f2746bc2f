"""Views of traffic of any kind: its text, its --json output, and its plots' data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.buckets.render.text import counted, table
from llmc.buckets.traffic.formats import FIELDS, create, recognise
from llmc.buckets.traffic.formats.base import Fields, StepFormat
from llmc.buckets.traffic.length_histogram import Lengths
from llmc.buckets.traffic.profile import LengthSketch, Profile, Window, drift, profile
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.step_histogram import StepHistogram
from llmc.buckets.traffic.trace_file import TraceFile

PERCENTS = (50, 90, 95, 99)
SHOWN_WINDOWS = 8
SHOWN_STEPS = 12

LENGTH_HEADER = ("tokens", "mean", *(f"p{percent}" for percent in PERCENTS), "longest")

Progress = Callable[[int, int], None]
"""Called with (bytes read, total bytes)."""


@dataclass(frozen=True)
class View:
    """The contents `what` of a file of the named format, as text that ends in a newline, and as a JSON document."""

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
    """Return the contents of a file of any kind, or of sampled histograms. Raises InputError like its format.

    `slots` are those of the simulated server that determines the number of concurrent requests (`profile`).
    """
    if isinstance(traffic, Lengths):
        return _of_lengths("prometheus", traffic)
    file = TraceFile(traffic)
    known = create(format) if format is not None else create(FIELDS) if fields else recognise(file)
    if isinstance(known, StepFormat):
        read = None if progress is None else lambda done: progress(done, file.size)
        found = known.steps(str(file.path), file.lines(read))
        return View(known.name, found, steps_text(found), steps_json(found), found.notes)
    trace: Trace = Trace(
        traffic,
        format=known.name,
        fields=fields,
        progress=None if progress is None else lambda done: progress(done, trace.size),
    )
    if trace.lengths is not None:
        return _of_lengths(known.name, trace.lengths)
    seen = profile(trace, has_times=trace.has_times, slots=slots)
    return View(known.name, seen, profile_text(seen), profile_json(seen), tuple(trace.counted()))


def _of_lengths(name: str, found: Lengths) -> View:
    return View(name, found, lengths_text(found), lengths_json(found), found.notes)


def profile_text(found: Profile) -> str:
    """Return lengths, concurrency and drift; ends in a newline."""
    when = f" in {_seconds(found.duration)}" if found.duration is not None else ", which record no times"
    rate = f", {found.rate:.3g} a second" if found.rate else ""
    lines = [f"{counted(found.requests, 'request')}{when}{rate}, {found.cached:.1%} of the prompts' tokens cached", ""]
    rows = [_row(name, sketch) for name, sketch in _sketches(found)]
    lines += table([LENGTH_HEADER, *rows], range(1, 7))
    if found.running is not None and found.running.number:
        p50, p90, p99 = (str(value) for value in found.running.percentiles((50, 90, 99)))
        full = ", which are too few for this rate" if p50 == str(found.slots) else ""
        lines += [
            "",
            f"running at once: p50 {p50}, p90 {p90}, p99 {p99}, most {found.running.longest} (decode steps of a "
            f"simulated 8B model on one accelerator with {found.slots} slots{full})",
        ]
    windows = joined(found.windows, SHOWN_WINDOWS)
    if len(windows) > 1:
        header = ("from", "requests", "a second", "prompt p50", "p90", "p99", "output p50", "p90", "p99")
        lines += ["", *table([header, *(_window_row(window) for window in windows)], range(9))]
        prompts, outputs = drift(windows)
        lines += [
            f"drift: in one part of the time, the share of prompts below some length differs by {100 * prompts:.0f} "
            f"points from the whole, of outputs by {100 * outputs:.0f}"
        ]
    return "\n".join(lines) + "\n"


def profile_json(found: Profile) -> dict[str, Any]:
    """Return the profile as a JSON object."""
    prompts, outputs = drift(found.windows)
    return {
        "kind": "requests",
        "requests": found.requests,
        "duration_s": found.duration,
        "rate": found.rate,
        "cached": round(found.cached, 6),
        "lengths": {name: _json(sketch) for name, sketch in _sketches(found)},
        "running": None if found.running is None else {**_json(found.running), "slots": found.slots},
        "windows": [
            {
                "from_s": window.start,
                "seconds": window.seconds,
                "requests": window.requests,
                "prompt": _json(window.prompt),
                "output": _json(window.output),
            }
            for window in found.windows
        ],
        "drift": {"prompt": round(prompts, 4), "output": round(outputs, 4)},
    }


def lengths_text(found: Lengths) -> str:
    """Return histogram percentiles as intervals; ends in a newline."""
    when = f" in {_seconds(found.duration)}" if found.duration is not None else ""
    rows = [LENGTH_HEADER]
    for name, values in _ranges(found).items():
        cells = [_interval(low, high) for low, high in values["percentiles"]]
        mean = "-" if values["mean"] is None else f"{values['mean']:,.1f}"
        rows.append((name, mean, *cells))
    lines = [f"{counted(found.requests, 'request')}{when}, lengths known by interval", ""]
    return "\n".join([*lines, *table(rows, range(1, 7))]) + "\n"


def lengths_json(found: Lengths) -> dict[str, Any]:
    """Return the histograms as a JSON object with all intervals."""
    ranges = _ranges(found)
    return {
        "kind": "lengths",
        "requests": found.requests,
        "duration_s": found.duration,
        **{
            name: {
                "mean": ranges[name]["mean"],
                "percentiles": {
                    f"p{percent}": list(values)
                    for percent, values in zip((*PERCENTS, 100), ranges[name]["percentiles"], strict=True)
                },
                "intervals": [list(one) for one in histogram.intervals],
            }
            for name, histogram in (("prompt", found.prompt), ("output", found.output))
        },
        "notes": list(found.notes),
    }


def _ranges(found: Lengths) -> Mapping[str, Any]:
    """For each of the two histograms its mean, and (low, high) of each percentile."""
    ranges = {}
    for name, histogram in (("prompt", found.prompt), ("output", found.output)):
        pairs = [(one.low, one.high) for one in map(histogram.at, (*PERCENTS, 100))]
        ranges[name] = {"mean": histogram.mean, "percentiles": pairs}
    return ranges


def steps_text(found: StepHistogram) -> str:
    """Return the most frequent steps and their padding; ends in a newline."""
    what = found.counted if found.steps != 1 else {"steps": "step", "misses": "miss"}[found.counted]
    padding = "" if found.padding is None else f", {found.padding:.1%} padding"
    lines = [f"{found.steps:,} {what} of {len(found.counts):,} shapes ({', '.join(found.axes)}){padding}"]
    if found.padded:
        lines.append("sizes include padding; the real token counts are unknown")
    most = sorted(found.counts.items(), key=lambda item: (-item[1], item[0].shape))[:SHOWN_STEPS]
    if most:
        rows = [("phase", *found.axes, "ran as", found.counted)]
        for key, count in most:
            ran = "-" if key.ran is None else "x".join(map(str, key.ran))
            rows.append((key.phase, *map(str, key.shape), ran, f"{count:,}"))
        lines += ["", *table(rows, range(1, len(rows[0])))]
        if len(found.counts) > SHOWN_STEPS:
            lines.append(f"and {len(found.counts) - SHOWN_STEPS:,} more shapes")
    for phase, shapes in (found.prepared or {}).items():
        lines.append(f"warmed up: {len(shapes):,} {phase} buckets")
    return "\n".join(lines) + "\n"


def steps_json(found: StepHistogram) -> dict[str, Any]:
    """Return the steps as a JSON object with all shapes."""
    return {
        "kind": "steps",
        "counted": found.counted,
        "axes": list(found.axes),
        "padded": found.padded,
        "steps": found.steps,
        "padding": found.padding,
        "shapes": [
            {
                "phase": key.phase,
                "shape": list(key.shape),
                "ran": None if key.ran is None else list(key.ran),
                "steps": n,
            }
            for key, n in found.counts.items()
        ],
        "prepared": {phase: [list(one) for one in shapes] for phase, shapes in (found.prepared or {}).items()},
        "notes": list(found.notes),
    }


def joined(windows: list[Window], most: int) -> list[Window]:
    """Return at most `most` windows, each merging several neighbours."""
    each = max(1, -(-len(windows) // most))
    found = []
    for first in range(0, len(windows), each):
        window = Window(windows[first].start, 0.0)
        for one in windows[first : first + each]:
            window.merge(one)
        found.append(window)
    return found


def _sketches(found: Profile) -> tuple[tuple[str, LengthSketch], ...]:
    return (("prompt", found.prompt), ("output", found.output), ("together", found.total))


def _row(name: str, sketch: LengthSketch) -> tuple[str, ...]:
    mean = "-" if sketch.mean is None else f"{sketch.mean:,.1f}"
    return (name, mean, *(_number(value) for value in sketch.percentiles(PERCENTS)), f"{sketch.longest:,}")


def _window_row(window: Window) -> tuple[str, ...]:
    lengths = [*window.prompt.percentiles((50, 90, 99)), *window.output.percentiles((50, 90, 99))]
    return (_seconds(window.start), f"{window.requests:,}", f"{window.rate:.3g}", *map(_number, lengths))


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _json(sketch: LengthSketch) -> dict[str, Any]:
    percentiles = zip(PERCENTS, sketch.percentiles(PERCENTS), strict=True)
    return {
        "mean": None if sketch.mean is None else round(sketch.mean, 3),
        **{f"p{percent}": value for percent, value in percentiles},
        "longest": sketch.longest,
    }


def _interval(low: int, high: int | None) -> str:
    return f"{low:,} or more" if high is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _seconds(seconds: float) -> str:
    """Readable seconds: "12.5 s", "3:20:00" from two minutes on."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
