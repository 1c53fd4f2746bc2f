"""A run as pictures: its latencies, and what happened over time."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.bench import pictures
from llmc.bench.loadtest.report import Report
from llmc.bench.loadtest.report_text import text
from llmc.buckets.render.page import check

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

HEIGHT = 3.2
"""Inches of each of the two rows."""


def draw(path: Path, report: Report) -> None:
    """Write plots of `report` to `path`: a .png picture, or a self-contained .html page with the report's text.

    Raises as buckets.plots.check and `pictures.write` do.
    """
    check(path)
    from llmc.buckets.render import figure

    title = f"{report.model}: {report.sent}"
    plots = [
        figure.Plot("Latencies: the share of requests at or below", HEIGHT, partial(_latencies, report=report)),
        figure.Plot("Over time", HEIGHT, partial(_timeline, report=report)),
    ]

    def body() -> str:
        drawings = [f"<h2>{html.escape(p.heading)}</h2>{figure.svg(p, f'p{i}-')}" for i, p in enumerate(plots)]
        return pictures.pre(text(report)) + "".join(drawings)

    pictures.write(path, title, plots, body)


def _latencies(figure: FigureBase, report: Report) -> None:
    from llmc.buckets.render.figure import MARK, REAL

    whole = [o for o in report.outcomes if o.ok]
    panels: dict[str, list[float | None]] = {
        "time to first token, ms": [o.ttft_s for o in whole],
        "between pieces of text, ms": [gap for o in whole for gap in o.gaps_s],
        "whole answer, ms": [o.e2e_s for o in whole],
    }
    every: Any = figure.subplots(1, len(panels))
    for axes, (label, values) in zip(every, panels.items(), strict=True):
        found = np.sort([value * 1e3 for value in values if value is not None])
        if found.size:
            axes.step(found, np.arange(1, found.size + 1) / found.size, where="post", color=REAL)
            for share in (50, 99):
                at = float(np.percentile(found, share))
                axes.axvline(at, color=MARK, linewidth=0.8, linestyle=":")
                where = f" p{share} {at:,.0f}" if at >= 100 else f" p{share} {at:.3g}"
                axes.annotate(where, (at, share / 100), fontsize=8)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)


def _timeline(figure: FigureBase, report: Report) -> None:
    from llmc.buckets.render.figure import PADDING, REAL

    first, second, third = figure.subplots(1, 3)
    sent = [o.sent_s for o in report.outcomes]
    ended = [o.ended_s for o in report.outcomes]
    moments = np.array(sorted([(t, 1.0) for t in sent] + [(t, -1.0) for t in ended]))
    first.step(moments[:, 0], np.cumsum(moments[:, 1]), where="post", color=REAL)
    first.set_ylabel("requests at once")
    _pieces(second, [t for o in report.outcomes for t in o.text_s])
    whole = [(o.due_s, o.ttft_s * 1e3) for o in report.outcomes if o.ok and o.ttft_s is not None]
    lost = [o.due_s for o in report.outcomes if not o.ok]
    third.plot([t for t, _ in whole], [ms for _, ms in whole], ".", color=REAL, markersize=3, label="first token")
    if lost:
        third.plot(lost, [0.0] * len(lost), "x", color=PADDING, markersize=4, label="refused or failed")
        third.legend()
    third.set_ylabel("time to first token, ms")
    for axes in (first, second, third):
        axes.set_xlabel("seconds")
        axes.set_xlim(0, max(ended) or 1.0)
        axes.set_ylim(bottom=0)


def _pieces(axes: Axes, times: Sequence[float]) -> None:
    from llmc.buckets.render.figure import REAL

    axes.set_ylabel("pieces of text a second")
    if not times:
        return
    edges = np.linspace(0.0, max(times) or 1.0, 61)
    counts, _ = np.histogram(times, edges)
    axes.step(edges[:-1], counts / np.diff(edges), where="post", color=REAL)
