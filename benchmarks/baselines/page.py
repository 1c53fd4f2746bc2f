"""Comparisons as pictures: a .png, or a self-contained page with the tables beside the plots."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baselines.report_text import HEADS, contenders, measurement, notes, number, ratios
from baselines.results import Comparison, Series
from llmc.buckets.render.page import check
from llmc.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from llmc.buckets.render.figure import Plot

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#24292f}}
pre{{overflow-x:auto;background:#f6f8fa;padding:1rem}}svg{{max-width:100%;height:auto}}h2{{font-size:1.2rem}}
h3{{font-size:1rem}}</style>
</head><body><h1>{title}</h1>{body}</body></html>
"""

BAR = 0.24
"""Inches of a bar."""

HOW = """All engines have the same weights and as many threads, stay open in processes of their own and take turns in
every round; prompts are random and new in each round, so that no cache of prefixes helps. Bars are medians over rounds,
lines their extremes. A ratio is llmc's figure over the best baseline's of its quality class in the same round, the
median over rounds: below 1 llmc is the better in times and memory, above 1 in rates. Where quality was not measured,
baselines of as many nominal bits or more count, which says nothing of a class. What is lost is listed with the rest."""


def draw(path: Path, found: Sequence[Comparison], title: str = "llmc against other engines", more: str = "") -> None:
    """Write the comparisons to `path`; `more` is HTML that follows them on a page.

    Raises as buckets.render.page.check does, and InputError when the file cannot be written.
    """
    check(path)
    from llmc.buckets.render import figure

    plots = [_plots(one) for one in found]
    if path.suffix.lower() == ".png":
        content = figure.png(title, [plot for some in plots for plot in some])
    else:
        content = PAGE.format(title=html.escape(title), body=_body(found, plots) + more).encode()
    write_bytes(path, content, "plots")


def _body(found: Sequence[Comparison], every: Sequence[Sequence[Plot]]) -> str:
    from llmc.buckets.render import figure

    body = [f"<p>{html.escape(HOW)}</p>"]
    for index, (one, plots) in enumerate(zip(found, every, strict=True)):
        body.append(f"<h2>{html.escape(heading(one))}</h2>{_pre([*contenders(one), '', *ratios(one), *_notes(one)])}")
        body += [figure.svg(plots[0], f"c{index}-ratios-")] if one.series else []
        for at, (series, plot) in enumerate(zip(one.series, plots[1:], strict=True)):
            body.append(f"<h3>{html.escape(series.name)}</h3>{figure.svg(plot, f'c{index}-{at}-')}")
            body.append(_pre(measurement(one, series)))
    return "".join(body)


def heading(found: Comparison) -> str:
    """The model and the host."""
    host = found.host
    return f"{found.model}: {host['cpu']}, {found.threads} threads, {host['memory_gib']} GiB"


def _notes(found: Comparison) -> list[str]:
    read = found.bandwidth
    words = [f"memory read by {found.threads} threads: {read / 1e9:.1f} GB/s"] if read else []
    said = [*words, *(f"note: {note}" for note in notes(found))]
    return ["", *said] if said else []


def _pre(lines: Sequence[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _plots(found: Comparison) -> list[Plot]:
    """The ratios first, then each measurement."""
    from llmc.buckets.render.figure import Plot

    if not found.series:
        return []
    ratios_found = [ratio for series in found.series for ratio in found.ratios(series)]
    name = heading(found)
    head = "; ".join(HEADS[by] for by in HEADS if any(r.by == by for r in ratios_found)) or HEADS["class"]
    plots = [Plot(f"{name}: {head}", 0.8 + BAR * max(1, len(ratios_found)), partial(_ratios, found=found))]
    for series in found.series:
        height = 0.7 + BAR * max(1, len(series.rounds))
        plots.append(Plot(f"{series.name}, {series.unit}", height, partial(_bars, found=found, series=series)))
    return plots


def _ratios(figure: FigureBase, found: Comparison) -> None:
    """A dot for each ratio with its range; those of rates are turned over, so that left of 1 is better in all."""
    from llmc.buckets.render.figure import FAINT, PADDING, REAL

    axes: Any = figure.subplots()
    labels: list[str] = []
    for series in found.series:
        for one in found.ratios(series):
            values = [one.median, one.least, one.most]
            middle, *ends = values if series.better == "less" else [1 / v for v in values]
            color = REAL if series.wins(one.median) else PADDING
            index = len(labels)
            axes.plot([min(ends), max(ends)], [index, index], color=color, linewidth=1.5)
            axes.plot([middle], [index], "o", color=color, markersize=5)
            labels.append(
                f"{series.name}: {one.ours} over {one.baseline}"
                + (" (turned over)" if series.better == "more" else "")
                + (" (by bits)" if one.by == "bits" else "")
            )
    axes.axvline(1.0, color=FAINT, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ratio: left of 1 llmc is the better")


def _bars(figure: FigureBase, found: Comparison, series: Series) -> None:
    from llmc.buckets.render.figure import FAINT, INK, MISSING, REAL

    axes: Any = figure.subplots()
    kinds = {c.name: c.kind for c in found.contenders}
    names = [c.name for c in found.contenders if c.name in series.rounds]
    for index, name in enumerate(names):
        values = series.rounds[name]
        axes.barh(index, series.median(name), height=0.7, color=REAL if kinds[name] == "llmc" else MISSING)
        axes.plot([min(values), max(values)], [index, index], color=INK, linewidth=0.8)
        axes.annotate(f" {number(series.median(name))}", (max(values), index), va="center", fontsize=8, color=FAINT)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{series.unit}, {series.better} is better")
