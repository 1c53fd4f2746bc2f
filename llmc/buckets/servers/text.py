"""Evaluations of server configurations, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmc.buckets.render.text import percent, size_text, table
from llmc.buckets.servers.base import Accepted, Shape
from llmc.buckets.servers.evaluation import FamilyEvaluation, ServerEvaluation

HEADER = ("configuration", "family", "graphs", "steps", "waste", "p50", "p95", "misses", "dead")
OWN = "the server's own"
"""What tables call the lists that the server would prepare by itself."""

SHOWN = 6
"""Shapes that a line names."""


def seconds(value: float | None) -> str:
    """A time as people say it: "29 min", "12 s"; "?" where it is not known."""
    if value is None:
        return "?"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(value: int | None) -> str:
    """A number of bytes as people say it; "?" where it is not known."""
    return "?" if value is None else size_text(value)


def comparison(found: Sequence[tuple[str, ServerEvaluation]]) -> str:
    """A row for each configuration and family, then what each costs at start and what it misses; ends in a newline."""
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
    wastes = (family.waste, family.waste_p50, family.waste_p95)
    return (
        name,
        f"{family.family.name} ({family.family.unit})",
        *(str(count) for count in counts),
        *(percent(waste) for waste in wastes),
        str(family.missing),
        str(len(family.dead)),
    )


def uncovered(found: ServerEvaluation) -> str:
    """The steps for which the server compiles in traffic, or which it refuses, by family; "" where there are none."""
    return "; ".join(
        f"{family.family.name} {_missed(family)}"
        for family in found.families
        if set(family.misses) - {"eager"} and family.missed
    )


def _missed(family: FamilyEvaluation) -> str:
    return ", ".join(f"{shape_text(shape)} ({steps} steps)" for shape, steps in family.missed[:SHOWN])


def ranges(found: Sequence[tuple[str, ServerEvaluation]], ends: Mapping[str, Sequence[ServerEvaluation]]) -> list[str]:
    """A line for each configuration whose waste is uncertain, since only intervals of lengths are known."""
    lines = []
    for name, one in found:
        for family, waste in one.waste.items() if name in ends else ():
            wastes = [each for each in (waste, *(end.waste[family] for end in ends[name])) if each is not None]
            if wastes:
                low, high = percent(min(wastes)), percent(max(wastes))
                said = f"{low} to {high} by where lengths lie in their intervals"
                lines.append(f"{name}: {family} waste {percent(waste)}, {said}")
    return lines


def accepted(name: str, found: Accepted) -> list[str]:
    """What the server leaves out of a list, and adds to it, a line for each reason."""
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
    """(1, 128, 0) as "1x128x0"."""
    return "x".join(map(str, shape))
