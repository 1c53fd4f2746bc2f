"""A page that justifies a server's configuration: before and after, drawn and in tables, everything inline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmc.buckets.render.text import percent
from llmc.buckets.servers import text
from llmc.buckets.servers.base import Export, Server, Setup
from llmc.buckets.servers.evaluation import ServerEvaluation
from llmc.buckets.servers.export import arguments_text, environment_text

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from llmc.buckets.render.page import Section

BAR = 0.34
"""Inches of a bar."""


@dataclass(frozen=True)
class Findings:
    """What a page tells: configurations of one server on the same steps, by name, and what is to be pasted."""

    server: Server
    setup: Setup
    evaluations: Sequence[tuple[str, ServerEvaluation]]
    export: Export
    notes: Sequence[str] = ()
    """Sentences below the tables: what was read, left out and added."""


def page(found: Findings) -> str:
    """The page. Raises DeviceError where matplotlib is not installed."""
    from llmc.buckets.render.figure import Plot, svg
    from llmc.buckets.render.page import Section, Table, columns
    from llmc.buckets.render.page import page as rendered

    drawings = []
    if found.evaluations:
        for place, family in enumerate(found.server.families, 1):
            height = 0.9 + BAR * len(found.evaluations)
            plot = Plot(f"{family.name}: {family.unit}", height, partial(_bars, found=found, family=family.name))
            drawings.append((f"{family.name}: what was needed, and padding, in {family.unit}", svg(plot, f"f{place}-")))
    sections = [_start(found)] if found.evaluations else []
    facts = [(name, str(value)) for name, value in found.setup.limits.to_dict().items()]
    facts += [(name, str(value)) for name, value in found.setup.own.items()]
    facts.append(("rules read in", found.server.source))
    tables = [Table("Limits and settings", columns(("name", "value"), 2), facts)]
    variables, flags = environment_text(found.export), arguments_text(found.export)
    for name, content in (("Variables", variables), ("Flags", flags), *found.export.files.items()):
        if content:
            rows = [(line,) for line in content.splitlines()]
            tables.append(Table(name, columns((name,), 1), rows))
    sections.append(Section("The configuration", tables, tuple(found.notes)))
    limits = ", ".join(f"{name} {value:,}" for name, value in found.setup.limits.to_dict().items())
    return rendered(f"{found.server.title}: {limits}", drawings, sections)


def _start(found: Findings) -> Section:
    from llmc.buckets.render.page import Section, Table, columns

    starts = [
        (
            name,
            f"{one.graphs:,}",
            text.seconds(one.warmup_seconds),
            text.size(one.graph_bytes),
            percent(one.missing),
        )
        for name, one in found.evaluations
    ]
    names = ("configuration", "graphs", "warm-up", "graph memory", "steps without a graph")
    tables = [Table("At start and on the traffic", columns(names, 1), starts, note=found.server.cost.source)]
    for family in found.server.families:
        rows = []
        for name, evaluation in found.evaluations:
            one = evaluation.family(family.name)
            counts = (len(one.shapes), one.steps, one.real, one.padded, one.missing, len(one.dead))
            wastes = (one.waste, one.waste_p50, one.waste_p95)
            rows.append((name, *(f"{count:,}" for count in counts), *(percent(waste) for waste in wastes)))
        header = (
            "configuration",
            "graphs",
            "steps",
            "needed",
            "computed",
            "misses",
            "never used",
            "waste",
            "p50",
            "p95",
        )
        tables.append(Table(f"{family.name}, in {family.unit}", columns(header, 1), rows))
    return Section("Before and after", tables)


def _bars(figure: FigureBase, found: Findings, family: str) -> None:
    """One bar a configuration: what the steps needed, and behind it what padding added."""
    from llmc.buckets.render.figure import PADDING, REAL, tokens

    axes = figure.subplots()
    for place, (_, evaluation) in enumerate(found.evaluations):
        one = evaluation.family(family)
        axes.barh(place, one.real, color=REAL, label="needed" if not place else None)
        axes.barh(place, one.padded - one.real, left=one.real, color=PADDING, label="padding" if not place else None)
        axes.annotate(f"  {percent(one.waste)}", (one.padded, place), va="center")
    axes.set_yticks(range(len(found.evaluations)), [name for name, _ in found.evaluations])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    tokens(axes.xaxis)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 1.25), ncols=2)
