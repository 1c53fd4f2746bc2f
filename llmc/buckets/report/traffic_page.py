"""Traffic plots: the distribution of its lengths, their change over time, and the number of concurrent requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from llmc.buckets.render import page
from llmc.buckets.render.figure import PHASE_COLORS, REAL, Plot, percents, powers_of_two, tokens
from llmc.buckets.render.page import Cells, Section, Table
from llmc.buckets.render.text import printable, shortened
from llmc.buckets.report.traffic_view import View
from llmc.buckets.traffic.length_histogram import Lengths
from llmc.buckets.traffic.profile import Profile, Window
from llmc.buckets.traffic.step_histogram import StepHistogram

HEIGHT = 3.4
"""Inches of each plot."""

TICKS = 16
DRAWN = 2000
"""Points of a distribution that is known by interval."""

COLORS = {"prompt": PHASE_COLORS["prompt"], "output": PHASE_COLORS["decode"]}
SHADES = ((50, 1.0), (90, 0.65), (99, 0.35))
"""Percentiles drawn over time, and their opacity."""


def draw(path: Path, name: str, view: View) -> None:
    """Write plots of `view`, called `name`, to a .png picture or a self-contained .html page.

    The page also has the output of `llmc traffic show`. Equal arguments give equal bytes; the file is written
    atomically. Raises InputError for another suffix or when it cannot be written, DeviceError without matplotlib.
    """
    title = f"Traffic of {shortened(printable(name), 70)}"
    lines: list[Cells] = [(line,) for line in view.text.splitlines() if line]
    table = Table("Output of llmc traffic show", (("", False),), lines)
    page.write(path, title, _plots(view.what), lambda: [Section("In numbers", [table], view.notes)])


def _plots(what: Profile | Lengths | StepHistogram) -> list[Plot]:
    if isinstance(what, StepHistogram):
        return [Plot("Steps by size", HEIGHT, partial(_steps, found=what))]
    if isinstance(what, Lengths):
        return [Plot("Lengths, between the ends of their intervals", HEIGHT, partial(_intervals, found=what))]
    plots = [Plot("Lengths", HEIGHT, partial(_lengths, found=what))]
    if len(what.windows) > 1:
        plots.append(Plot("Over time", 2 * HEIGHT, partial(_windows, windows=what.windows)))
    if what.running is not None and what.running.number:
        heading = f"Requests that run at once, on a simulated 8B model with {what.slots} slots"
        plots.append(Plot(heading, HEIGHT, partial(_running, found=what)))
    return plots


def _lengths(figure: FigureBase, found: Profile) -> None:
    axis = figure.subplots(1, 1)
    for name, sketch in (("prompt", found.prompt), ("output", found.output)):
        lengths = sorted(sketch.counts)
        shares = [count / sketch.number for count in accumulate(sketch.counts[length] for length in lengths)]
        axis.step(lengths, shares, where="post", color=COLORS[name], linewidth=1.6, label=name)
    _as_distribution(axis, "tokens", "share of requests")


def _intervals(figure: FigureBase, found: Lengths) -> None:
    axis = figure.subplots(1, 1)
    shares = [(index + 1) / DRAWN for index in range(DRAWN)]
    for name, histogram in (("prompt", found.prompt), ("output", found.output)):
        low, middle, high = (histogram.drawn(DRAWN, end) for end in ("low", "middle", "high"))
        axis.fill_betweenx(shares, low, high, color=COLORS[name], alpha=0.2, linewidth=0)
        axis.plot(middle, shares, color=COLORS[name], linewidth=1.6, label=name)
    _as_distribution(axis, "tokens", "share of requests")


def _as_distribution(axis: Axes, what: str, share: str) -> None:
    axis.set_xscale("log", base=2)
    powers_of_two(axis.xaxis, TICKS)
    percents(axis.yaxis)
    axis.set_ylim(0, 1.01)
    axis.set_xlabel(what)
    axis.set_ylabel(share)
    axis.legend(loc="upper left", frameon=False)


def _windows(figure: FigureBase, windows: Sequence[Window]) -> None:
    rates, prompts, outputs = figure.subplots(3, 1, sharex=True)
    starts = [window.start for window in windows]
    ends = [*starts, windows[-1].start + windows[-1].seconds]
    rates.stairs([window.rate for window in windows], ends, color=REAL, fill=True)
    rates.set_ylabel("requests a second")
    for axis, name in ((prompts, "prompt"), (outputs, "output")):
        sketches = [window.prompt if name == "prompt" else window.output for window in windows]
        for percent, alpha in SHADES:
            values = [
                float("nan") if value is None else value for (value,) in (s.percentiles([percent]) for s in sketches)
            ]
            axis.stairs(
                values, ends, baseline=None, color=COLORS[name], alpha=alpha, linewidth=1.6, label=f"p{percent}"
            )
        axis.set_ylabel(f"{name} tokens")
        tokens(axis.yaxis)
        axis.set_ylim(bottom=0)
        axis.legend(loc="upper right", frameon=False, ncols=len(SHADES))
    outputs.set_xlabel("seconds")


def _running(figure: FigureBase, found: Profile) -> None:
    assert found.running is not None
    axis = figure.subplots(1, 1)
    numbers = sorted(found.running.counts)
    steps = found.running.number
    axis.bar(numbers, [found.running.counts[number] / steps for number in numbers], width=1.0, color=REAL)
    percents(axis.yaxis)
    axis.set_xlabel("requests")
    axis.set_ylabel("share of decode steps")


def _steps(figure: FigureBase, found: StepHistogram) -> None:
    axis = figure.subplots(1, 1)
    index = found.axes.index("tokens") if "tokens" in found.axes else 1
    steps: dict[int, int] = {}
    for key, count in found.counts.items():
        steps[key.shape[index]] = steps.get(key.shape[index], 0) + count
    sizes = sorted(steps)
    shares = [count / max(1, found.steps) for count in accumulate(steps[size] for size in sizes)]
    axis.step(sizes, shares, where="post", color=REAL, linewidth=1.6, label=found.axes[index])
    _as_distribution(axis, found.axes[index], f"share of {found.counted}")
