"""The frontier: the least padding for each number of graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.buckets.bucket import PHASES, Phase
from llmc.buckets.selection import Chosen, PhaseProblem
from llmc.buckets.text_table import percent, table

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of graphs that are tried by default."""


@dataclass(frozen=True)
class FrontierPoint:
    """The best choice of at most `graphs` buckets of each phase."""

    graphs: int
    chosen: Mapping[Phase, Chosen]

    def to_dict(self) -> dict[str, object]:
        """The point as JSON holds it: per phase graphs chosen, waste, and the gap to the lower bound of the cost."""
        phases: dict[str, object] = {
            phase: {
                "graphs": len(choice.buckets),
                "waste": choice.waste,
                "ragged_waste": choice.ragged,
                "gap": choice.gap,
            }
            for phase, choice in self.chosen.items()
        }
        return {"graphs": self.graphs, **phases}


def points(problems: Mapping[Phase, PhaseProblem], counts: Sequence[int] = COUNTS) -> list[FrontierPoint]:
    """A point for each number of graphs, up to the first at which neither phase can use more."""
    most = max(problem.most for problem in problems.values())
    kept = [graphs for place, graphs in enumerate(counts) if place == 0 or counts[place - 1] < most]
    chosen = {
        phase: problem.choose_each([min(graphs, problem.most) for graphs in kept])
        for phase, problem in problems.items()
    }
    return [
        FrontierPoint(graphs, {phase: choices[place] for phase, choices in chosen.items()})
        for place, graphs in enumerate(kept)
    ]


def text(frontier: Sequence[FrontierPoint]) -> str:
    """The frontier as a plain-text table; ends in a newline."""
    rows: list[tuple[str, ...]] = [("graphs", *(f"{phase} {what}" for phase in PHASES for what in ("waste", "gap")))]
    for point in frontier:
        cells = [str(point.graphs)]
        for phase in PHASES:
            choice = point.chosen[phase]
            cells += [percent(choice.waste), percent(choice.gap)]
        rows.append(tuple(cells))
    lines = [
        *table(rows, right=range(5)),
        "gap: how far the cost may lie above that of the best choice of as many graphs",
    ]
    return "\n".join(lines) + "\n"
