"""Results of server configurations on traffic: tables for a terminal, and a self-contained page that justifies one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmc.buckets.render.text import percent, size_text, table
from llmc.integrations.base import Accepted, BucketRules, Export, Setup, Shape
from llmc.integrations.configuration import arguments_text, environment_text
from llmc.integrations.evaluation import FamilyEvaluation, ServerEvaluation

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from llmc.buckets.render.page import Section


BAR = 0.34
"""Inches of a bar."""


@dataclass(frozen=True)
class Findings:
    """Contents of a page: configurations of one server on the same steps, by name, and the text to paste."""

    server: BucketRules
    setup: Setup
    evaluations: Sequence[tuple[str, ServerEvaluation]]
    export: Export
    notes: Sequence[str] = ()
    """Sentences below the tables: the input, and dropped and added contents."""


def page(found: Findings) -> str:
    """Return the page. Raises DeviceError where matplotlib is not installed."""
    from llmc.buckets.render.figure import Plot, svg
    from llmc.buckets.render.page import Section, Table, columns
    from llmc.buckets.render.page import page as rendered

    drawings = []
    if found.evaluations:
        for index, family in enumerate(found.server.families, 1):
            height = 0.9 + BAR * len(found.evaluations)
            plot = Plot(f"{family.name}: {family.unit}", height, partial(_bars, found=found, family=family.name))
            drawings.append((f"{family.name}: real work and padding, in {family.unit}", svg(plot, f"f{index}-")))
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
            seconds(one.warmup_seconds),
            size(one.graph_bytes),
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
            counts = (len(one.shapes), one.steps, one.real, one.padded, one.missing, len(one.unused))
            all_padding = (one.padding, one.padding_p50, one.padding_p95)
            rows.append((name, *(f"{count:,}" for count in counts), *(percent(padding) for padding in all_padding)))
        header = (
            "configuration",
            "graphs",
            "steps",
            "needed",
            "computed",
            "misses",
            "never used",
            "padding",
            "p50",
            "p95",
        )
        tables.append(Table(f"{family.name}, in {family.unit}", columns(header, 1), rows))
    return Section("Before and after", tables)


def _bars(figure: FigureBase, found: Findings, family: str) -> None:
    """One bar per configuration: the steps' real work, and behind it the padding."""
    from llmc.buckets.render.figure import PADDING, REAL, tokens

    axes = figure.subplots()
    for index, (_, evaluation) in enumerate(found.evaluations):
        one = evaluation.family(family)
        axes.barh(index, one.real, color=REAL, label="needed" if not index else None)
        axes.barh(index, one.padded - one.real, left=one.real, color=PADDING, label="padding" if not index else None)
        axes.annotate(f"  {percent(one.padding)}", (one.padded, index), va="center")
    axes.set_yticks(range(len(found.evaluations)), [name for name, _ in found.evaluations])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    tokens(axes.xaxis)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 1.25), ncols=2)


HEADER = ("configuration", "family", "graphs", "steps", "padding", "p50", "p95", "misses", "unused")
OWN = "the server's own"
"""Name in tables of the lists that the server would prepare by itself."""

SHOWN = 6
"""Shapes that a line names."""


def seconds(value: float | None) -> str:
    """Return a readable time: "29 min", "12 s"; "?" where unknown."""
    if value is None:
        return "?"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(value: int | None) -> str:
    """Return a readable number of bytes; "?" where unknown."""
    return "?" if value is None else size_text(value)


def comparison(found: Sequence[tuple[str, ServerEvaluation]]) -> str:
    """Return a row for each configuration and family, then its start-up costs and misses; ends in a newline."""
    rows: list[tuple[str, ...]] = [HEADER]
    for name, evaluation in found:
        rows += [_row(name, family) for family in evaluation.families]
    lines = table(rows, range(2, 9))
    lines.append("")
    starts = [("configuration", "graphs at start", "warm-up", "graph memory", "steps without a graph")]
    for name, one in found:
        starts.append(
            (name, str(one.graphs), seconds(one.warmup_seconds), size(one.graph_bytes),
             percent(one.missing))
        )  # fmt: skip
    lines += table(starts, range(1, 5))
    for name, evaluation in found:
        for family in evaluation.families:
            if family.missed:
                what = " and ".join(f"{steps} {miss}" for miss, steps in family.misses.items())
                lines.append(f"{name}: {family.family.name} steps without a graph: {what}; {_missed(family)}")
    return "\n".join(lines) + "\n"


def _row(name: str, family: FamilyEvaluation) -> tuple[str, ...]:
    counts = (len(family.shapes), family.steps)
    all_padding = (family.padding, family.padding_p50, family.padding_p95)
    return (
        name,
        f"{family.family.name} ({family.family.unit})",
        *(str(count) for count in counts),
        *(percent(padding) for padding in all_padding),
        str(family.missing),
        str(len(family.unused)),
    )


def uncovered(found: ServerEvaluation) -> str:
    """Return the steps that the server compiles during serving, or refuses, by family; "" without any."""
    return "; ".join(
        f"{family.family.name} {_missed(family)}"
        for family in found.families
        if set(family.misses) - {"eager"} and family.missed
    )


def _missed(family: FamilyEvaluation) -> str:
    return ", ".join(f"{shape_text(shape)} ({steps} steps)" for shape, steps in family.missed[:SHOWN])


def ranges(found: Sequence[tuple[str, ServerEvaluation]], ends: Mapping[str, Sequence[ServerEvaluation]]) -> list[str]:
    """Return a line for each configuration with uncertain padding, where only intervals of lengths are known."""
    lines = []
    for name, one in found:
        for family, padding in one.padding.items() if name in ends else ():
            all_padding = [each for each in (padding, *(end.padding[family] for end in ends[name])) if each is not None]
            if all_padding:
                low, high = percent(min(all_padding)), percent(max(all_padding))
                said = f"{low} to {high} by where lengths lie in their intervals"
                lines.append(f"{name}: {family} padding {percent(padding)}, {said}")
    return lines


def accepted(name: str, found: Accepted) -> list[str]:
    """Return a line for each reason why the server drops graphs from a list, and for those it adds."""
    reasons: dict[tuple[str, str], list[Shape]] = {}
    for family, shape, reason in found.dropped:
        reasons.setdefault((family, reason), []).append(shape)
    lines = [
        f"{name}: the server leaves out {len(shapes)} {family} graphs, {reason}: {_few(shapes)}"
        for (family, reason), shapes in reasons.items()
    ]
    added: dict[str, list[Shape]] = {}
    for family, shape in found.added:
        added.setdefault(family, []).append(shape)
    return lines + [
        f"{name}: the server adds {len(shapes)} {family} graphs: {_few(shapes)}" for family, shapes in added.items()
    ]


def _few(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(shape_text, shapes[:SHOWN])) + (", …" if len(shapes) > SHOWN else "")


def shape_text(shape: Shape) -> str:
    """Return (1, 128, 0) as "1x128x0"."""
    return "x".join(map(str, shape))
