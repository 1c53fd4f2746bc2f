"""The HTML page: the plots, then what they show as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.buckets.bucket import PHASES, Phase
from llmc.buckets.plots.data import PlanView, percent, printable
from llmc.buckets.plots.template import PAGE
from llmc.buckets.report import HEADER, dimension_rows

if TYPE_CHECKING:
    from llmc.buckets.frontier import FrontierPoint

MAX_ROWS = 2000
"""Buckets of one phase that the page lists."""

EVALUATION = ("phase", "graphs", "requests", "steps", "waste", "ragged", "p50", "p95", "p99", "dead", "uncovered")
USES = ("batch", "query", "context", "steps", "rows", "real tokens", "padded tokens", "waste", "share")

RAGGED = "ragged: the part of the waste by sequences of unequal length that share a step, whatever the buckets."

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of the page: (name, right-aligned) of its columns, its rows, and what is left out of them."""

    heading: str
    header: tuple[tuple[str, bool], ...]
    rows: Sequence[Cells]
    note: str = ""
    sortable: bool = False


@dataclass(frozen=True)
class Section:
    """Tables and notes under one heading."""

    heading: str
    tables: list[Table]
    notes: tuple[str, ...] = ()


def page(
    title: str,
    drawings: Sequence[tuple[str, str]],
    views: Sequence[PlanView],
    frontier: Sequence[FrontierPoint],
) -> str:
    """The whole page on plans; `drawings` as in `render`."""
    sections = [_comparison(views)] if len(views) > 1 and views[0].evaluation is not None else []
    sections += [_plan(view) for view in views]
    if frontier:
        sections.append(_frontier(frontier))
    return render(title, drawings, sections)


def render(title: str, drawings: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """A page; `drawings` are (heading, svg element), trusted as they are, all other text is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(PAGE).render(title=title, drawings=drawings, sections=sections)


def columns(names: Sequence[str], left: int) -> tuple[tuple[str, bool], ...]:
    """`names` as a header, the first `left` columns aligned to the left."""
    return tuple((name, place >= left) for place, name in enumerate(names))


def _comparison(views: Sequence[PlanView]) -> Section:
    table = Table("By plan and phase", *_evaluations(views), note=RAGGED, sortable=True)
    return Section("The plans on the same traffic", [table])


def _evaluations(views: Sequence[PlanView]) -> tuple[tuple[tuple[str, bool], ...], list[Cells]]:
    """Header and rows of what traffic does on plans; seconds where any plan has them."""
    results = [(view, result) for view in views for phase in PHASES if (result := view.result(phase)) is not None]
    timed = any(result.seconds is not None for _, result in results)
    names = ("plan", *EVALUATION, *(("seconds",) if timed else ()))
    rows = []
    for view, result in results:
        wastes = (result.waste, result.ragged_waste, result.waste_p50, result.waste_p95, result.waste_p99)
        counts = (len(result.buckets), result.requests, result.steps)
        seconds = () if not timed else ("–" if result.seconds is None else f"{result.seconds:,.1f}",)
        rows.append(
            (
                view.name,
                result.phase,
                *(f"{count:,}" for count in counts),
                *(percent(waste) for waste in wastes),
                f"{len(result.dead):,}",
                f"{result.uncovered:,}",
                *seconds,
            )
        )
    return columns(names, 2), rows


def _plan(view: PlanView) -> Section:
    plan = view.plan
    facts = [("strategy", plan.provenance.strategy), ("digest", plan.digest())]
    facts += [(name, f"{value:,}") for name, value in plan.limits.to_dict().items()]
    facts += [(name, str(value)) for name, value in plan.provenance.facts.items()]
    tables = [Table("Limits and origin", columns(("name", "value"), 2), [_printable(fact) for fact in facts])]
    dimensions = [_printable(row.cells()) for row in dimension_rows(plan)]
    tables.append(Table("Values", tuple((name, name == "number") for name in HEADER), dimensions))
    if view.evaluation is not None:
        tables.append(Table("On the traffic", *_evaluations([view]), note=RAGGED))
    tables += [_buckets(view, phase) for phase in PHASES]
    return Section(view.name, tables, view.notes)


def _buckets(view: PlanView, phase: Phase) -> Table:
    """Every bucket of a phase: with traffic the most padded tokens first, otherwise in plan order."""
    buckets, result = view.buckets(phase), view.result(phase)
    heading = f"{phase.capitalize()} buckets ({len(buckets):,})"
    left_out = len(buckets) - MAX_ROWS
    note = f"{left_out:,} more are left out; the plan file has all of them." if left_out > 0 else ""
    if result is None:
        names = ("batch", "query", "context")
        rows = [_numbers(bucket.batch, bucket.query, bucket.context) for bucket in buckets[:MAX_ROWS]]
        return Table(heading, columns(names, 0), rows, note, sortable=True)
    uses = sorted(result.buckets, key=lambda use: -use.padded_tokens)[:MAX_ROWS]
    rows = [
        (
            *_numbers(use.bucket.batch, use.bucket.query, use.bucket.context),
            *_numbers(use.steps, use.requests, use.real_tokens, use.padded_tokens),
            percent(use.waste),
            percent(use.share),
        )
        for use in uses
    ]
    return Table(heading, columns(USES, 0), rows, note, sortable=True)


def _frontier(frontier: Sequence[FrontierPoint]) -> Section:
    names = ["at most", *(f"{phase} {what}" for phase in PHASES for what in ("graphs", "waste", "ragged", "gap"))]
    rows = []
    for point in frontier:
        cells = [f"{point.graphs:,}"]
        for phase in PHASES:
            choice = point.chosen[phase]
            cells += [f"{len(choice.buckets):,}", percent(choice.waste), percent(choice.ragged), percent(choice.gap)]
        rows.append(tuple(cells))
    note = f"{RAGGED} gap: how far the cost may lie above that of the best choice of as many graphs."
    return Section("Waste against graphs", [Table("Best choices", columns(names, 0), rows, note)])


def _numbers(*values: int) -> Cells:
    return tuple(f"{value:,}" for value in values)


def _printable(cells: Sequence[str]) -> Cells:
    return tuple(map(printable, cells))
