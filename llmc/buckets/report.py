"""What a plan holds, for people: rows of data, and the same as plain text."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.buckets.bucket import PHASES
from llmc.buckets.plan import Plan
from llmc.buckets.strategies.base import DIMENSIONS
from llmc.buckets.text_table import table
from llmc.settings import BOUNDS

SHOWN_VALUES = 8
"""Values of a dimension that the text lists; of a longer list the first ones and the last."""

HEADER = ("dimension", "values", "number", "min,step,max", "from")


@dataclass(frozen=True)
class DimensionRow:
    """One dimension of a plan.

    `values` are the distinct ones among the plan's buckets, ascending, so that what was added is there and what was
    dropped is not. `bounds` is "min,step,max" as planned with and the rule's other numbers by name, `origin` where
    they come from; both are empty for a plan that records none.
    """

    dimension: str
    values: tuple[int, ...]
    bounds: str
    origin: str

    def cells(self) -> tuple[str, str, str, str, str]:
        """The row as text, in the order of `HEADER`."""
        shown = [str(value) for value in self.values]
        if len(shown) > SHOWN_VALUES:
            shown = [*shown[: SHOWN_VALUES - 2], "…", shown[-1]]
        return self.dimension, " ".join(shown), str(len(self.values)), self.bounds, self.origin


def dimension_rows(plan: Plan) -> list[DimensionRow]:
    """A row for every dimension, in the order of `DIMENSIONS`."""
    rows = []
    for dimension in DIMENSIONS:
        phase, _, name = dimension.partition("_")
        buckets = plan.prompt if phase == "prompt" else plan.decode
        values = tuple(sorted({getattr(bucket, name) for bucket in buckets}))
        numbers = plan.provenance.parameters.get(dimension, {})
        bounds = ",".join(str(numbers[bound]) for bound in BOUNDS if bound in numbers)
        bounds += "".join(f" {name} {number}" for name, number in numbers.items() if name not in BOUNDS)
        rows.append(DimensionRow(f"{phase} {name}", values, bounds, _origin(plan, dimension)))
    return rows


def text(plan: Plan) -> str:
    """The report of `llmc plan`: limits, dimensions, number of buckets, and every note; ends in a newline."""
    origins = plan.provenance.origins
    lines = [_with_origin(f"strategy {plan.provenance.strategy}", origins.get("strategy"))]
    for name, value in plan.limits.to_dict().items():
        what = f"{name} {value}" if name != "contexts" else "contexts: none, the model keeps states alone"
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
    """What a plan that was made with traffic is expected to waste on it."""
    facts = plan.provenance.facts
    lines = []
    if "requests" in facts:
        done = "chosen for" if any(f"{phase}_gap" in facts for phase in PHASES) else "judged on"
        rate = f" at {facts['arrival_rate']} requests/s" if "arrival_rate" in facts else ""
        lines.append(f"{done} {facts['requests']:,} recorded requests{rate}, cost in {facts.get('cost', 'tokens')}")
    for phase in PHASES:
        waste, gap, ragged = (facts.get(f"{phase}_{what}") for what in ("waste", "gap", "ragged_waste"))
        if not isinstance(waste, float | int):
            continue
        line = f"expected {phase} waste {waste:.1%}"
        if isinstance(ragged, float | int) and ragged:
            line += f", {ragged:.1%} of it by unequal lengths in one step"
        line += f", over {facts[f'{phase}_steps']:,} steps"
        if isinstance(gap, float | int):
            line += "; the best choice there is" if gap < 0.0005 else f"; cost within {gap:.1%} of the best choice"
        lines.append(line)
    return lines


def _with_origin(fact: str, origin: str | None) -> str:
    return f"{fact} ({origin})" if origin else fact
