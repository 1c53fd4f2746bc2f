"""Plans and evaluations as plain text: a plan's contents, its results on traffic, and comparisons of plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.buckets.bucket import PHASES, Bucket
from llmc.buckets.evaluation.replay import Evaluation, PhaseEvaluation
from llmc.buckets.plan import Plan
from llmc.buckets.render.text import counted, percent, table
from llmc.buckets.strategies.base import DIMENSIONS, phase_of
from llmc.settings import BOUNDS

if TYPE_CHECKING:
    from llmc.buckets.planner.choice import FrontierPoint

SHOWN = 8
"""Most values of a dimension, and of unused buckets, that the text lists; longer lists show the first and the last."""

HEADER = ("dimension", "values", "number", "min,step,max", "limits from")


@dataclass(frozen=True)
class DimensionRow:
    """One dimension of a plan.

    `values` are the distinct ascending values in the plan's buckets, including added and without dropped ones. `bounds`
    is the planned "min,step,max" and the rule's other numbers by name, `origin` their source; both are empty for a plan
    without a record of them.
    """

    dimension: str
    values: tuple[int, ...]
    bounds: str
    origin: str

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the row as text, in the order of `HEADER`."""
        return self.dimension, _shortened(map(str, self.values)), str(len(self.values)), self.bounds, self.origin


def dimension_rows(plan: Plan) -> list[DimensionRow]:
    """Return a row for every dimension, in the order of `DIMENSIONS`."""
    rows = []
    for dimension in DIMENSIONS:
        phase, name = phase_of(dimension), dimension.partition("_")[2]
        values = tuple(sorted({getattr(bucket, name) for bucket in plan.of(phase)}))
        numbers = plan.provenance.parameters.get(dimension, {})
        bounds = ",".join(str(numbers[bound]) for bound in BOUNDS if bound in numbers)
        bounds += "".join(f" {name} {number}" for name, number in numbers.items() if name not in BOUNDS)
        rows.append(DimensionRow(f"{phase} {name}", values, bounds, _origin(plan, dimension)))
    return rows


def plan_text(plan: Plan) -> str:
    """Return the report of `llmc plan`: limits, dimensions, number of buckets, and every note; ends in a newline."""
    origins = plan.provenance.origins
    lines = [_with_origin(f"strategy {plan.provenance.strategy}", origins.get("strategy"))]
    for name, value in plan.limits.to_dict().items():
        what = f"{name} {value}" if name != "contexts" else "contexts: none, the model has only recurrent state"
        lines.append(_with_origin(what, origins.get(name)))
    lines += ["", *table([HEADER, *(row.cells() for row in dimension_rows(plan))]), ""]
    lines.append(f"buckets: {len(plan.prompt)} prompt, {len(plan.decode)} decode")
    lines += _expectation(plan)
    lines += [str(note) for note in plan.provenance.notes]
    return "\n".join(lines) + "\n"


def _origin(plan: Plan, dimension: str) -> str:
    known = plan.provenance.parameters.get(dimension, BOUNDS)
    origins = {bound: plan.provenance.origins.get(f"{dimension}.{bound}", "") for bound in known}
    distinct = set(origins.values())
    if len(distinct) == 1:
        return distinct.pop()
    return ", ".join(f"{bound}: {origin}" for bound, origin in origins.items() if origin)


def _expectation(plan: Plan) -> list[str]:
    """The expected padding of a plan created with traffic."""
    facts = plan.provenance.facts
    lines = []
    if "requests" in facts:
        done = "chosen for" if any(f"{phase}_gap" in facts for phase in PHASES) else "judged on"
        rate = f" at {facts['arrival_rate']} requests/s" if "arrival_rate" in facts else ""
        lines.append(f"{done} {facts['requests']:,} recorded requests{rate}, cost in {facts.get('cost', 'tokens')}")
    for phase in PHASES:
        padding, gap, ragged = (facts.get(f"{phase}_{what}") for what in ("padding", "gap", "ragged_padding"))
        if not isinstance(padding, float | int):
            continue
        line = f"expected {phase} padding {padding:.1%}"
        if isinstance(ragged, float | int) and ragged:
            line += f", {100 * ragged:.1f} points of it by unequal lengths in one step"
        line += f", over {facts[f'{phase}_steps']:,} steps"
        if isinstance(gap, float | int):
            line += "; the best choice there is" if gap < 0.0005 else f"; cost within {gap:.1%} of the best choice"
        lines.append(line)
    return lines


def _with_origin(fact: str, origin: str | None) -> str:
    return f"{fact} ({origin})" if origin else fact


USE_HEADER = ("bucket", "steps", "rows", "padding", "share")
COMPARISON_HEADER = ("plan", "phase", "graphs", "steps", "padding", "p50", "p95", "p99", "unused", "seconds")


def evaluation_text(evaluation: Evaluation, *, hottest: int = 8) -> str:
    """Return the report on one plan: totals, the `hottest` buckets and unused ones, by phase; ends in a newline."""
    sections = [_section(phase, hottest) for phase in evaluation.phases]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def comparison_text(evaluations: Sequence[tuple[str, Evaluation]]) -> str:
    """Return one table with a row for each plan and phase; ends in a newline.

    The seconds column appears when any plan has them. Uncovered requests follow the table, since the padding of its row
    excludes them.
    """
    rows: list[tuple[str, ...]] = [COMPARISON_HEADER]
    uncovered = []
    for name, evaluation in evaluations:
        for phase in evaluation.phases:
            rows.append(_comparison_row(name, phase))
            if phase.uncovered:
                uncovered.append(f"{name}: {_uncovered(phase)}")
    if not any(row[-1] for row in rows[1:]):
        return "\n".join([*table([row[:-1] for row in rows], range(2, 9)), *uncovered]) + "\n"
    return "\n".join([*table(rows, range(2, 10)), *uncovered]) + "\n"


def range_text(name: str, evaluation: Evaluation, all_padding: Mapping[str, tuple[float, float]]) -> str:
    """Return the uncertainty of the padding for traffic with lengths known by interval; ends in a newline."""
    lines = []
    for phase in evaluation.phases:
        if phase.phase in all_padding:
            low, high = all_padding[phase.phase]
            what = f"{name}: {phase.phase}" if name else phase.phase
            lines.append(f"{what} padding {percent(phase.padding)} ({percent(low)} to {percent(high)})")
    return "\n".join([*lines, "the range: all lengths at the low or at the high end of their intervals"]) + "\n"


def _comparison_row(name: str, phase: PhaseEvaluation) -> tuple[str, ...]:
    all_padding = (phase.padding, phase.padding_p50, phase.padding_p95, phase.padding_p99)
    return (
        name,
        phase.phase,
        str(len(phase.buckets)),
        str(phase.steps),
        *(percent(padding) for padding in all_padding),
        str(len(phase.unused)),
        "" if phase.seconds is None else f"{phase.seconds:.1f}",
    )


def _section(phase: PhaseEvaluation, hottest: int) -> list[str]:
    lines = [f"{phase.phase}: {counted(phase.requests, 'request')} in {counted(phase.steps, 'step')}"]
    if phase.uncovered:
        lines.append(_uncovered(phase))
    if phase.steps:
        lines.append(
            f"padding {percent(phase.padding)} (steps: p50 {percent(phase.padding_p50)}, "
            f"p95 {percent(phase.padding_p95)}, p99 {percent(phase.padding_p99)}), "
            f"{phase.real_tokens} tokens padded to {phase.padded_tokens}"
        )
        if phase.ragged_padding:
            lines.append(
                f"{100 * phase.ragged_padding:.1f} points of it by unequal lengths in one step, which no bucket avoids"
            )
        if phase.seconds is not None:
            lines.append(f"{phase.seconds:.1f} s by the bench")
    used = phase.hottest(hottest)
    if used:
        rows = [
            (shape(use.bucket), str(use.steps), str(use.requests), percent(use.padding), percent(use.share))
            for use in used
        ]
        lines += ["", *table([USE_HEADER, *rows], range(1, 5)), ""]
    unused = phase.unused
    lines.append(
        f"never used: {len(unused)} of {len(phase.buckets)} buckets{': ' if unused else ''}"
        f"{_shortened(map(shape, unused))}"
    )
    return lines


def _uncovered(phase: PhaseEvaluation) -> str:
    what = "request" if phase.phase == "prompt" else "step"
    return (
        f"{phase.uncovered} {phase.phase} {what}{'' if phase.uncovered == 1 else 's'} covered by no bucket: plan anew"
    )


def _shortened(texts: Iterable[str]) -> str:
    shown = list(texts)
    if len(shown) > SHOWN:
        shown = [*shown[: SHOWN - 2], "…", shown[-1]]
    return " ".join(shown)


def shape(bucket: Bucket) -> str:
    """Return a bucket without its phase: "4x512+0"."""
    return f"{bucket.batch}x{bucket.query}+{bucket.context}"


def frontier_text(frontier: Sequence[FrontierPoint]) -> str:
    """Return the frontier as a plain-text table; ends in a newline."""
    rows: list[tuple[str, ...]] = [("graphs", *(f"{phase} {what}" for phase in PHASES for what in ("padding", "gap")))]
    for point in frontier:
        cells = [str(point.graphs)]
        for phase in PHASES:
            choice = point.chosen[phase]
            cells += [percent(choice.padding), percent(choice.gap)]
        rows.append(tuple(cells))
    lines = [
        *table(rows, right=range(5)),
        "gap: how far the cost may lie above that of the best choice of as many graphs",
    ]
    return "\n".join(lines) + "\n"
