"""The frontier as a plot: the least padding for each number of graphs, and the plans' positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from llmc.buckets.bucket import PHASES, Phase
from llmc.buckets.render.figure import FAINT, INK, PHASE_COLORS, percents_of_ten, powers_of_two
from llmc.buckets.render.text import counted, percent, shortened
from llmc.buckets.report.plan_view import PlanView, spread

if TYPE_CHECKING:
    from llmc.buckets.planner.choice import FrontierPoint

HEIGHT = 3.8
"""Inches that `draw` needs."""

MAX_PLANS = 6
"""Most plans marked next to the frontier."""

LEAST_DRAWN = 1e-3
"""Lower padding is drawn at this value, since the axis is logarithmic."""

MARKERS = "DsP^vX"


def draw(figure: FigureBase, frontier: Sequence[FrontierPoint], views: Sequence[PlanView]) -> None:
    """Draw padding against the number of graphs, a panel for each phase."""
    axes = figure.subplots(1, 2)
    for axis, phase in zip(axes, PHASES, strict=True):
        _draw_phase(axis, frontier, phase, views)


class CurvePoint(NamedTuple):
    """The best choice of a number of graphs: its padding, a lower bound on any choice's, and the ragged padding."""

    graphs: int
    padding: float
    bound: float
    ragged: float


def curve(frontier: Sequence[FrontierPoint], phase: Phase) -> list[CurvePoint]:
    """Return the points of a phase, ascending by the graphs actually used, without points that have no padding.

    The bound scales the padding by the ratio of the cost's lower bound to the cost, (1 + padding) / (1 + gap) − 1. It
    is exact where cost is tokens, and approximate where cost is seconds.
    """
    found: dict[int, CurvePoint] = {}
    for point in frontier:
        choice = point.chosen[phase]
        if choice.padding is not None:
            bound = max((1.0 + choice.padding) / (1.0 + choice.gap) - 1.0, 0.0)
            graphs = len(choice.buckets)
            found.setdefault(graphs, CurvePoint(graphs, choice.padding, bound, choice.ragged))
    return [found[graphs] for graphs in sorted(found)]


def _draw_phase(axis: Axes, frontier: Sequence[FrontierPoint], phase: Phase, views: Sequence[PlanView]) -> None:
    points = curve(frontier, phase)
    if not points:
        axis.set_title(f"{phase}: the traffic takes no step", fontweight="bold")
        axis.set_axis_off()
        return
    graphs = [point.graphs for point in points]
    all_padding = _drawn([point.padding for point in points])
    color = PHASE_COLORS[phase]
    if any(point.bound < point.padding - 1e-9 for point in points):
        bounds = _drawn([point.bound for point in points])
        axis.fill_between(graphs, bounds, all_padding, color=color, alpha=0.15, linewidth=0, label="gap to the bound")
    axis.plot(graphs, all_padding, color=color, marker="o", markersize=4, label="best choice")
    ragged = [(point.graphs, point.ragged) for point in points if point.ragged > LEAST_DRAWN]
    if ragged:
        label = "ragged: unequal lengths in a step"
        axis.plot(*zip(*ragged, strict=True), color=FAINT, linestyle="--", linewidth=1, label=label)
    for marker, view in zip(MARKERS, views[:MAX_PLANS], strict=False):
        result = view.result(phase)
        if result is not None and result.padding is not None:
            at = [len(result.buckets)], _drawn([result.padding])
            label = f"{shortened(view.name, 24)}, measured"
            axis.plot(*at, color=INK, marker=marker, markersize=6, linestyle="", label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10)
    powers_of_two(axis.xaxis)
    percents_of_ten(axis.yaxis)
    axis.grid(axis="y", color=FAINT, alpha=0.2)
    axis.set_xlabel("graphs of the phase")
    axis.set_ylabel("padding: padding / real tokens")
    axis.legend(loc="best")
    first, *others = spread(points, 3)
    rest = "".join(f", {percent(point.padding)} with {point.graphs:,}" for point in others)
    axis.set_title(
        f"{phase}: {percent(first.padding)} padding with {counted(first.graphs, 'graph')}{rest}", fontweight="bold"
    )


def _drawn(all_padding: Sequence[float]) -> list[float]:
    return [max(padding, LEAST_DRAWN) for padding in all_padding]
