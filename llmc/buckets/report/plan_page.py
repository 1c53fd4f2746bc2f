"""Pages on plans: the plots in order, then their data as tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.bucket import PHASES, Phase
from llmc.buckets.evaluation.replay import RAGGED, RESULT, USE
from llmc.buckets.render import page
from llmc.buckets.render.page import Cells, Section, Table, columns, counts
from llmc.buckets.render.text import percent, printable, shortened
from llmc.buckets.report.plan_view import PlanView, gather
from llmc.buckets.report.text import HEADER, dimension_rows
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.buckets.planner.choice import FrontierPoint
    from llmc.buckets.render.figure import Plot
    from llmc.buckets.traffic.source import Traffic


def draw(
    path: Path, plans: Sequence[tuple[str, Plan]], traffic: Traffic | None, frontier: Sequence[FrontierPoint]
) -> None:
    """Write plots of `plans`, at least one (name, plan), to `path`: a .png picture or a self-contained .html page.

    With `traffic`, which each plan replays, they show its padding and compare the plans. Without, they only show which
    bucket serves each request. `frontier` may be empty. The page also has tables of the plotted data. Equal arguments
    give equal bytes; the file is written atomically.

    Raises InputError for another suffix, for no plan, for unreadable traffic, and when the file cannot be written;
    DeviceError when matplotlib is not installed.
    """
    path = Path(path)
    page.check(path)
    if not plans:
        raise InputError("there is no plan to draw; give at least one")
    views = gather(plans, traffic)
    page.write(path, title(views), plots(views, frontier), lambda: sections(views, frontier))


DIGITS = 16
"""Digits of a digest that a page shows."""


def _fact(name: str, value: object) -> str:
    """A fact as people read it: shares in percent, digests without most of their digits."""
    if isinstance(value, float) and name.endswith(("_padding", "_gap")):
        return percent(value)
    return f"{value[:DIGITS]}…" if isinstance(value, str) and len(value) == 64 else str(value)


MAX_DETAILED = 4
"""Most plans with plots of their own; further ones are only compared."""


def plots(views: Sequence[PlanView], frontier: Sequence[FrontierPoint]) -> list[Plot]:
    """Return the plots for some plans: the comparison first, then each plan, then the frontier."""
    from llmc.buckets.render.figure import Plot
    from llmc.buckets.report import bars, curve, maps

    found = []
    measured = all(view.evaluation is not None for view in views)
    if len(views) > 1 and measured:
        some = f", the first {bars.MAX_COMPARED} of them" if len(views) > bars.MAX_COMPARED else ""
        heading = f"{len(views)} plans on the same traffic{some}"
        found.append(Plot(heading, bars.comparison_height(views), partial(bars.draw_comparison, views=views)))
    scales = {phase: maps.darkest(views[:MAX_DETAILED], phase) for phase in PHASES}
    for view in views[:MAX_DETAILED]:
        name = shortened(view.name, 60)
        what = "the bucket that serves each request" + (", its padding, and the traffic" if measured else "")
        found.append(Plot(f"{name}: {what}", maps.height(view), partial(maps.draw, view=view, scales=scales)))
        if measured:
            found.append(
                Plot(f"{name}: the hottest buckets", bars.padding_height(view), partial(bars.draw_padding, view=view))
            )
    if frontier:
        found.append(Plot("Padding against graphs", curve.HEIGHT, partial(curve.draw, frontier=frontier, views=views)))
    return found


def title(views: Sequence[PlanView]) -> str:
    """Return the page title: the strategy and limits of one plan, or the names of several."""
    if len(views) > 1:
        left_out = f" (the first {MAX_DETAILED} in detail)" if len(views) > MAX_DETAILED else ""
        return f"{len(views)} bucket plans: {shortened(', '.join(view.name for view in views), 70)}{left_out}"
    plan = views[0].plan
    limits = ", ".join(f"{name} {value:,}" for name, value in plan.limits.to_dict().items())
    return f"{printable(plan.provenance.strategy)}: {limits}"


MAX_ROWS = 2000
"""Buckets of one phase that the page lists."""


def sections(views: Sequence[PlanView], frontier: Sequence[FrontierPoint]) -> list[Section]:
    """Return the tables of a page on plans."""
    found = [_comparison(views)] if len(views) > 1 and views[0].evaluation is not None else []
    found += [_plan(view) for view in views]
    if frontier:
        found.append(_frontier(frontier))
    return found


def _comparison(views: Sequence[PlanView]) -> Section:
    table = Table("By plan and phase", *_evaluations(views), note=RAGGED, sortable=True)
    return Section("The plans on the same traffic", [table])


def _evaluations(views: Sequence[PlanView]) -> tuple[tuple[tuple[str, bool], ...], list[Cells]]:
    """Header and rows of the plans' results on traffic; seconds where any plan has them."""
    results = [(view, result) for view in views for phase in PHASES if (result := view.result(phase)) is not None]
    timed = any(result.seconds is not None for _, result in results)
    names = ("plan", *RESULT, *(("seconds",) if timed else ()))
    rows = []
    for view, result in results:
        seconds = () if not timed else ("–" if result.seconds is None else f"{result.seconds:,.1f}",)
        rows.append((view.name, *result.cells(), *seconds))
    return columns(names, 2), rows


def _plan(view: PlanView) -> Section:
    plan = view.plan
    facts = [("strategy", plan.provenance.strategy), ("digest", _fact("digest", plan.digest()))]
    facts += [(name, f"{value:,}") for name, value in plan.limits.to_dict().items()]
    facts += [(name, _fact(name, value)) for name, value in plan.provenance.facts.items()]
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
        rows = [counts(*bucket.shape) for bucket in buckets[:MAX_ROWS]]
        return Table(heading, columns(names, 0), rows, note, sortable=True)
    uses = sorted(result.buckets, key=lambda use: -use.padded_tokens)[:MAX_ROWS]
    return Table(heading, columns(USE, 0), [use.cells() for use in uses], note, sortable=True)


def _frontier(frontier: Sequence[FrontierPoint]) -> Section:
    names = ["at most", *(f"{phase} {what}" for phase in PHASES for what in ("graphs", "padding", "ragged", "gap"))]
    rows = []
    for point in frontier:
        cells = [f"{point.graphs:,}"]
        for phase in PHASES:
            choice = point.chosen[phase]
            cells += [f"{len(choice.buckets):,}", percent(choice.padding), percent(choice.ragged), percent(choice.gap)]
        rows.append(tuple(cells))
    note = f"{RAGGED} gap: how far the cost may lie above that of the best choice of as many graphs."
    return Section("Padding against graphs", [Table("Best choices", columns(names, 0), rows, note)])


def _printable(cells: Sequence[str]) -> Cells:
    return tuple(map(printable, cells))
