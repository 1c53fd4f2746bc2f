"""Figures: the common style of all plots, rendered as one picture or as one drawing each."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

INK, FAINT, LINE, PAPER, MISSING = "#24292f", "#57606a", "#afb8c1", "#eef1f4", "#c9ced4"
REAL, PADDING, MARK = "#4c84b6", "#f0a35e", "#0a3d66"
PHASE_COLORS = {"prompt": "#1f5f99", "decode": "#c0561c"}

SETTINGS = {
    "svg.hashsalt": "llmc",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.6,
    "hatch.color": LINE,
}


@contextmanager
def settings() -> Iterator[None]:
    """Draw with `SETTINGS` on matplotlib's own defaults, ignoring the user's, so that equal plots are equal bytes.

    A name in a script that the font lacks is drawn as boxes, without a warning.
    """
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        yield


def powers_of_two(axis: Axis, most: int = 12) -> None:
    """Set about `most` ticks on a log-2 axis, at powers of two, written in full."""
    axis.set_major_locator(LogLocator(base=2, numticks=most))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else ""))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def percents_of_ten(axis: Axis) -> None:
    """Set ticks on a log-10 axis of fractions, in percent, at 1, 2 and 5 of every power of ten."""
    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    percents(axis)
    axis.set_minor_locator(NullLocator())


def percents(axis: Axis) -> None:
    """Set ticks on an axis of fractions, in percent."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:,.3g}%"))


def tokens(axis: Axis) -> None:
    """Set ticks on an axis of tokens, in thousands, millions …"""
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def short(value: float) -> str:
    """Return a number with three digits and its unit: 12.3M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


WIDTH = 12.0
"""Inches of every plot."""

HEADING = 0.35
"""Inches of a plot's heading in a picture."""

DOTS_PER_INCH = 110

TAG = re.compile(r"<[^<>]*>")
ID = re.compile(r'((?<=\s)id="|href="#|url\(#)([^")]+)')
"""An id in a tag: the text before it, and the id."""


@dataclass(frozen=True)
class Plot:
    """One plot: its heading, its height in inches, and its drawing function for a figure of that height."""

    heading: str
    height: float
    draw: Callable[[FigureBase], None]


def png(title: str, found: Sequence[Plot]) -> bytes:
    """Return all plots below each other as a PNG picture."""
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
    """Return the plot as an <svg> element whose ids begin with `prefix`, so that a page can hold several."""
    stream = io.StringIO()
    with settings():
        figure = _figure(plot.height)
        FigureCanvasSVG(figure)
        plot.draw(figure)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(stream, format="svg", dpi=DOTS_PER_INCH, metadata=no_metadata)
    text = stream.getvalue()
    return _with_prefix(text[text.index("<svg ") :], prefix)


def _with_prefix(text: str, prefix: str) -> str:
    """Prefix all ids; matplotlib repeats an id for equal images, so later ones get a number."""
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
