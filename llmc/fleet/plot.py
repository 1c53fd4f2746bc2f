"""Cold starts against the number of nodes: a panel for each entry, a line for each way of pulling."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter

from llmc.buckets.render import figure, page
from llmc.buckets.render.figure import FAINT, INK, MARK, PADDING, PHASE_COLORS
from llmc.buckets.render.page import Section, Table, columns
from llmc.buckets.render.text import printable, shortened
from llmc.fleet.report import WAYS

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from llmc.fleet.report import FleetPlan

HEIGHT = 3.4
"""Inches of a panel."""
COLORS = dict(zip(WAYS, (PHASE_COLORS["decode"], FAINT, PADDING, MARK), strict=True))


def draw(path: Path, found: FleetPlan) -> None:
    """Write `path`, a .png or self-contained .html, atomically; equal plans give equal bytes. Raises InputError."""
    nodes = sum(cost.replicas for cost in found.costs)
    title = f"A fleet of {nodes:,} nodes: cold starts by nodes that pull at once"
    plots = [
        figure.Plot(printable(shortened(cost.label, 60)), HEIGHT, partial(_panel, found=found, at=at))
        for at, cost in enumerate(found.costs)
    ]
    report = Table("As printed", columns(("report",), 1), [(line,) for line in found.text().splitlines() if line])
    page.write(path, title, plots, lambda: [Section("The plan", [report])])


def _panel(figure: FigureBase, found: FleetPlan, at: int) -> None:
    axis = figure.subplots()
    for one in found.scales[at]:
        nodes = [start.nodes for start in one.starts]
        color = COLORS[one.way]
        axis.plot(nodes, [start.p99_s for start in one.starts], color=color, marker="o", markersize=3, label=one.way)
        axis.plot(nodes, [start.p50_s for start in one.starts], color=color, linestyle=":", linewidth=1)
    if found.bound_s is not None:
        axis.axhline(found.bound_s, color=INK, linewidth=1, linestyle="--", label="the bound")
    axis.set_xscale("log")
    axis.set_yscale("log")
    for one_axis in (axis.xaxis, axis.yaxis):
        one_axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.grid(axis="y", color=FAINT, alpha=0.2)
    axis.set_xlabel("nodes at once")
    axis.set_ylabel("seconds to ready: p99, dotted p50")
    axis.legend(loc="upper left")
