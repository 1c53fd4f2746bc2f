"""The plots of a page in order, and their rendering: one picture, or a drawing for each."""

from __future__ import annotations

import io
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import ConstrainedLayoutEngine

from llmc.buckets.bucket import PHASES
from llmc.buckets.files import write_bytes
from llmc.buckets.pages import render
from llmc.buckets.plots import bars, curve, maps
from llmc.buckets.plots.data import PlanView, printable, shortened
from llmc.buckets.plots.style import settings

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.buckets.frontier import FrontierPoint
    from llmc.buckets.pages.tables import Section

WIDTH = 12.0
"""Inches of every plot."""

HEADING = 0.35
"""Inches of a plot's heading in a picture."""

DOTS_PER_INCH = 110

TAG = re.compile(r"<[^<>]*>")
ID = re.compile(r'((?<=\s)id="|href="#|url\(#)([^")]+)')
"""Where an id stands in a tag: what is before it, and the id."""

MAX_DETAILED = 4
"""Plans with plots of their own; more of them are only compared."""


@dataclass(frozen=True)
class Plot:
    """One plot: its heading, its height in inches, and what draws it on a figure of that height."""

    heading: str
    height: float
    draw: Callable[[FigureBase], None]


def plots(views: Sequence[PlanView], frontier: Sequence[FrontierPoint]) -> list[Plot]:
    """What is drawn for some plans: the comparison first, then each plan, then the frontier."""
    found = []
    measured = all(view.evaluation is not None for view in views)
    if len(views) > 1 and measured:
        some = f", the first {bars.MAX_COMPARED} of them" if len(views) > bars.MAX_COMPARED else ""
        heading = f"{len(views)} plans on the same traffic{some}"
        found.append(Plot(heading, bars.comparison_height(views), partial(bars.draw_comparison, views=views)))
    scales = {phase: maps.darkest(views[:MAX_DETAILED], phase) for phase in PHASES}
    for view in views[:MAX_DETAILED]:
        name = shortened(view.name, 60)
        what = "the bucket that serves each request" + (", its waste, and the traffic" if measured else "")
        found.append(Plot(f"{name}: {what}", maps.height(view), partial(maps.draw, view=view, scales=scales)))
        if measured:
            found.append(
                Plot(f"{name}: the hottest buckets", bars.padding_height(view), partial(bars.draw_padding, view=view))
            )
    if frontier:
        found.append(Plot("Waste against graphs", curve.HEIGHT, partial(curve.draw, frontier=frontier, views=views)))
    return found


def title(views: Sequence[PlanView]) -> str:
    """What the page is about: the strategy and limits of one plan, or the names of several."""
    if len(views) > 1:
        left_out = f" (the first {MAX_DETAILED} in detail)" if len(views) > MAX_DETAILED else ""
        return f"{len(views)} bucket plans: {shortened(', '.join(view.name for view in views), 70)}{left_out}"
    plan = views[0].plan
    limits = ", ".join(f"{name} {value:,}" for name, value in plan.limits.to_dict().items())
    return f"{printable(plan.provenance.strategy)}: {limits}"


def png(title: str, found: Sequence[Plot]) -> bytes:
    """All plots under each other, as a PNG picture."""
    heights = [plot.height + HEADING for plot in found]
    stream = io.BytesIO()
    with settings():
        figure = _figure(sum(heights) + 2 * HEADING)
        FigureCanvasAgg(figure)
        figure.suptitle(textwrap.fill(title, 96), x=0.01, ha="left", fontsize=13, fontweight="bold")
        parts = figure.subfigures(len(found), 1, height_ratios=heights, squeeze=False).flat
        for part, plot in zip(parts, found, strict=True):
            part.suptitle(plot.heading, x=0.01, ha="left", fontsize=12)
            plot.draw(part.subfigures())
        figure.savefig(stream, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return stream.getvalue()


def svg(plot: Plot, prefix: str) -> str:
    """One plot as an <svg> element whose ids begin with `prefix`, so that several can be on a page."""
    stream = io.StringIO()
    with settings():
        figure = _figure(plot.height)
        FigureCanvasSVG(figure)
        plot.draw(figure)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(stream, format="svg", dpi=DOTS_PER_INCH, metadata=no_metadata)
    text = stream.getvalue()
    return _with_prefix(text[text.index("<svg ") :], prefix)


def write(path: Path, title: str, plots: Sequence[Plot], sections: Callable[[], Sequence[Section]]) -> None:
    """Write `plots` to `path`, whole or not at all: as a .png picture, or as an .html page with `sections` below them.

    Equal arguments give equal bytes. Raises InputError when the file cannot be written.
    """
    if path.suffix.lower() == ".png":
        content = png(title, plots)
    else:
        drawings = [(plot.heading, svg(plot, f"p{place}-")) for place, plot in enumerate(plots, 1)]
        content = render.page(title, drawings, sections()).encode()
    write_bytes(path, content, "plots")


def _with_prefix(text: str, prefix: str) -> str:
    """All ids begin with `prefix`; of those that matplotlib gives twice, to equal images, the later get a number."""
    known: Counter[str] = Counter()

    def renamed(found: re.Match[str]) -> str:
        before, name = found.groups()
        if before == 'id="':
            known[name] += 1
            if known[name] > 1:
                name = f"{name}-{known[name]}"
        return f"{before}{prefix}{name}"

    return TAG.sub(lambda tag: ID.sub(renamed, tag[0]), text)


def _figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.05))
