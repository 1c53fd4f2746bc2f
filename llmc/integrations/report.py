"""Results of server configurations on traffic: tables for a terminal, and a self-contained page that justifies one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from llmc.buckets.plan import Fact
from llmc.buckets.render.text import counted, percent, size_text, table
from llmc.integrations.base import Accepted, BucketRules, Export, Setup, Shape
from llmc.integrations.configuration import arguments_text, environment_text
from llmc.integrations.evaluation import FamilyEvaluation, ServerEvaluation
from llmc.integrations.tune import Tuned
from llmc.version import __version__

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
    origin: Sequence[tuple[str, str]] = ()
    """Name and value of each fact on the report's origin (`origin`)."""
    others: Others = field(default_factory=dict)
    """Configurations on other traffic, by its name."""


Others = Mapping[str, Sequence[tuple[str, ServerEvaluation]]]
"""Evaluations of configurations, each with its name, by the name of the traffic."""


def origin(server: BucketRules, facts: Mapping[str, Fact], command: str = "") -> list[tuple[str, str]]:
    """Return what a report, and comments in written files, say of their origin, each with its name.

    `facts` are those of observed traffic, empty without traffic; `command` is the command line.
    """
    found = [("written by", f"llmc {__version__}, for {server.title} (--server {server.name})")]
    if "traffic" in facts:
        unit = "requests" if "requests" in facts else "steps"
        period = f", {facts['period']}" if "period" in facts else ""
        found.append(("traffic", f"{facts['traffic']}: {facts[unit]:,} {unit}{period}"))
    if "traffic_sha256" in facts:
        found.append(("sha256 of the traffic", str(facts["traffic_sha256"])))
    return found + ([("command", command)] if command else [])


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
    sections = []
    if found.origin:
        sections.append(Section("Origin", [Table("This report", columns(("name", "value"), 2), list(found.origin))]))
    if found.evaluations:
        sections.append(_start(found))
    if found.others:
        header, *rows = _other_rows(found.others)
        sections.append(Section("Padding on other traffic", [Table("Padding", columns(header, 1), rows)], (SHIFTED,)))
    facts = [(name, _setting(value)) for name, value in found.setup.limits.to_dict().items()]
    facts += [(name, _setting(value)) for name, value in found.setup.own.items()]
    facts.append(("rules read in", found.server.source))
    tables = [Table("Limits and settings", columns(("name", "value"), 2), facts)]
    variables, flags = environment_text(found.export), arguments_text(found.export)
    for name, content in (("Variables", variables), ("Flags", flags), *found.export.files.items()):
        if content:
            rows = [(line,) for line in content.splitlines()]
            tables.append(Table(name, columns((name,), 1), rows))
    sections.append(Section("The configuration", tables, tuple(found.notes)))
    if found.evaluations:
        sections.append(Section("Terms", [Table("Words of this report", columns(("term", "meaning"), 2), TERMS)]))
    limits = ", ".join(f"{name} {value:,}" for name, value in found.setup.limits.to_dict().items())
    return rendered(f"{found.server.title}: {limits}", drawings, sections)


TERMS = (
    ("graph", "a compiled program of fixed sizes: a step is padded to the sizes of the graph that covers it"),
    ("family", "one list of graphs of the server, such as prefill or decode"),
    ("padding", "work on padding over real work, in the family's unit"),
    ("p50, p95", "the padding that half of the steps, and 95% of them, do not exceed"),
    ("misses", "steps that no graph covers: they run without one, or are compiled during serving"),
    ("unused", "graphs that no step of this traffic uses"),
    ("warm-up", "the time in which the server compiles or captures its graphs at start"),
)  # fmt: skip
SHIFTED = (
    "Halves and days that are held out: both configurations are judged on them, and the tuned one is planned from the "
    "traffic before them. Lengths × 2 and × 0.5: each request has twice or half as many tokens, within the limits. "
    "Arrivals × 2: requests arrive twice as fast. Uniform steps: all sizes that the server's own lists reach, equally "
    "often. These shifts are simulated."
)


def _setting(value: object) -> str:
    """A setting as people write it."""
    return "the server's own" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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
            "unused",
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


def others_text(found: Others) -> str:
    """Return a table of padding on other traffic: a row for each, a column for each family and configuration."""
    rows = _other_rows(found)
    return "\n".join(table(rows, range(1, len(rows[0])))) + "\n"


def others_json(found: Others) -> dict[str, object]:
    """Return the evaluations on other traffic as a JSON object."""
    return {traffic: {name: one.to_dict() for name, one in pair} for traffic, pair in found.items()}


def _other_rows(found: Others) -> list[tuple[str, ...]]:
    names = [name for name, _ in next(iter(found.values()))]
    families = [one.family.name for one in next(iter(found.values()))[0][1].families if one.family.counted]
    rows: list[tuple[str, ...]] = [("padding on", *(f"{family}: {name}" for family in families for name in names))]
    for traffic, evaluations in found.items():
        all_padding = (one.family(family).padding for family in families for _, one in evaluations)
        rows.append((traffic, *map(percent, all_padding)))
    return rows


def hedge_text(tuned: Tuned) -> list[str]:
    """Return sentences on the hedge of a plan: its price, and where it pads more than the server's own lists."""
    lines = []
    if any(named for named in tuned.weights.values()):
        price = " and ".join(
            f"{max(0.0, 100 * points):.1f} points of {family}" for family, points in tuned.price.items()
        )
        lines.append(f"hedged against other traffic, which adds {price} padding on this traffic (--hedge)")
    for shift, families in tuned.worse.items():
        own, chosen = tuned.shifts[shift]
        worse = ", ".join(
            f"{family} {percent(chosen.family(family).padding)} instead of {percent(own.family(family).padding)}"
            for family in families
        )
        lines.append(f"pads more than the server's own lists on {shift}: {worse}")
    return lines


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
    return ", ".join(f"{shape_text(shape)} ({counted(steps, 'step')})" for shape, steps in family.missed[:SHOWN])


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
