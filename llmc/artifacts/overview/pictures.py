"""Plots: disk usage, time since last use, and what bundles share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import FigureBase

from llmc.artifacts.overview.survey import HeldBundle, Survey, ages, kinds, unnamed
from llmc.buckets.render.figure import FAINT, MARK, PADDING, REAL, Plot
from llmc.buckets.render.text import UNITS, printable, shortened, size_text

BAR, AROUND = 0.26, 1.0
"""Inches per bar, and around all bars of a plot."""

MOST_BARS = 16
LONGEST = 44
"""Longest name of a bar, in characters."""

Bar = tuple[str, int, int]
"""A bar: its name and its two parts in bytes."""


def title(survey: Survey) -> str:
    """Return the title of the page."""
    location = shortened(printable(str(survey.root)), 60)
    return f"{location}: {size_text(survey.usage.total)} on disk, {len(survey.entries):,} entries"


def plots(survey: Survey, held: Sequence[HeldBundle]) -> list[Plot]:
    """Return the plots of a store."""
    found = [
        _bars("Where the bytes are", _locations(survey), ("in no bundle", "in bundles too")),
        _bars(
            "Blobs by the time since they were used: less than …",
            [(age.name, age.free, age.kept) for age in ages(survey)],
            ("may be collected", "pinned or in use"),
            (REAL, MARK),
        ),
    ]
    if held:
        largest = sorted(held, key=lambda one: -one.between.size)[:MOST_BARS]
        bars = [(f"{one.model} for {one.device} ({one.listed.entry.key.short})", *one.between) for one in largest]
        some = f", the {MOST_BARS} largest" if len(held) > MOST_BARS else ""
        found.append(_bars(f"Bundles{some}", bars, ("no other bundle has", "other bundles have too")))
    return found


def _locations(survey: Survey) -> list[Bar]:
    found = [kind for kind in kinds(survey) if kind.size]
    bars: list[Bar] = [(kind.name, kind.apart, kind.bundled) for kind in found[:MOST_BARS]]
    if rest := found[MOST_BARS:]:
        bars.append(("other kinds", sum(kind.apart for kind in rest), sum(kind.bundled for kind in rest)))
    others = (
        ("blobs that no entry names", unnamed(survey)),
        ("the entries themselves", survey.usage.entry_bytes),
        ("bundle folders alone", survey.usage.bundle_bytes),
        ("quarantine and temporaries", survey.usage.other_bytes),
    )
    return bars + [(name, size, 0) for name, size in others if size]


def _bars(heading: str, bars: Sequence[Bar], names: tuple[str, str], colors: tuple[str, str] = (REAL, PADDING)) -> Plot:
    height = AROUND + BAR * max(1, len(bars))
    return Plot(heading, height, partial(_draw_bars, bars=bars, names=names, colors=colors))


def _draw_bars(figure: FigureBase, bars: Sequence[Bar], names: tuple[str, str], colors: tuple[str, str]) -> None:
    axes = figure.subplots()
    most = max((first + second for _, first, second in bars), default=0)
    if not most:
        axes.set_axis_off()
        axes.text(0, 0.5, "there are no such bytes", color=FAINT, transform=axes.transAxes)
        return
    unit = min((most.bit_length() - 1) // 10, len(UNITS) - 1)
    for index, (_, *parts) in enumerate(bars):
        first, second = (part / (1 << 10 * unit) for part in parts)
        axes.barh(index, first, color=colors[0], label=names[0] if not index else None)
        axes.barh(index, second, left=first, color=colors[1], label=names[1] if not index else None)
        end = (first + second, index)
        axes.annotate(size_text(sum(parts)), end, (5, 0), textcoords="offset points", va="center", color=FAINT)
    axes.set_yticks(range(len(bars)), [shortened(printable(name), LONGEST) for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * most / (1 << 10 * unit))
    axes.set_xlabel(UNITS[unit])
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
