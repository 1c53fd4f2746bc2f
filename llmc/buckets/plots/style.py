"""The look that all plots share, and how they write numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axis import Axis
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
    """Draw with `SETTINGS` on matplotlib's own defaults, whatever the user's are, so that equal plots are equal bytes.

    A name in a script that the font lacks is drawn as boxes, without a warning.
    """
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        yield


def powers_of_two(axis: Axis, most: int = 12) -> None:
    """About `most` ticks of a log-2 axis, at powers of two, written in full."""
    axis.set_major_locator(LogLocator(base=2, numticks=most))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else ""))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def percents_of_ten(axis: Axis) -> None:
    """Ticks of a log-10 axis of fractions, in percent, at 1, 2 and 5 of every power of ten."""
    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    percents(axis)
    axis.set_minor_locator(NullLocator())


def percents(axis: Axis) -> None:
    """Ticks of an axis of fractions, in percent."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:,.3g}%"))


def tokens(axis: Axis) -> None:
    """Ticks of an axis of tokens, in thousands, millions …"""
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def short(value: float) -> str:
    """A number of three digits and its unit: 12.3M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
