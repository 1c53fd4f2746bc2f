"""The best buckets of one phase for traffic: at most K of them, and the least padding for each K."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Bucket, Phase
from llmc.buckets.cost.objective import Objective, Points
from llmc.buckets.cost.work import cost
from llmc.buckets.limits import Limits
from llmc.buckets.optimise.solver import frontier
from llmc.buckets.planner.candidates import Candidates
from llmc.buckets.planner.demand import Observed
from llmc.errors import InputError


@dataclass(frozen=True)
class Chosen:
    """Buckets for one phase, and their expected costs on the traffic they were chosen for.

    `cost` is in the objective's unit. `bound` is a lower bound on the cost of every choice of as many buckets from the
    same candidates, for steps of the same batches; equal in one dimension. `padding` is (padded − real) / real in
    tokens, None when the traffic has no token in this phase. `ragged` is the part of it that buckets of exactly each
    step's size would leave, since sequences of unequal length share steps.
    """

    buckets: tuple[Bucket, ...]
    cost: float
    bound: float
    padding: float | None
    ragged: float

    @property
    def added(self) -> float:
        """The padding that the buckets add to the ragged padding."""
        return 0.0 if self.padding is None else self.padding - self.ragged

    @property
    def gap(self) -> float:
        """Distance of the cost from the lower bound, as a fraction of the bound."""
        return self.cost / self.bound - 1 if self.bound > 0 else 0.0


class PhaseProblem:
    """The choice for one phase; `choose` accepts any number of graphs and caches its answers."""

    def __init__(self, candidates: Candidates, observed: Sequence[Observed], objective: Objective) -> None:
        required = candidates.covers_all()
        if required is None:
            raise InputError(
                f"no single {candidates.phase} bucket among the candidates covers every admissible request; "
                f"widen the {candidates.phase} ranges"
            )
        self.candidates = candidates
        self.required = required
        self._observed = observed
        self._objective = objective
        self._chosen: dict[int, Chosen] = {}

    @property
    def most(self) -> int:
        """Number of graphs beyond which nothing improves."""
        return self.candidates.count

    def choose(self, graphs: int) -> Chosen:
        """Return the best plan of this phase with at most `graphs` buckets. Raises InputError like `choose_each`."""
        return self.choose_each([graphs])[0]

    def choose_each(self, counts: Sequence[int]) -> list[Chosen]:
        """Return the best plan of this phase for each number of graphs; more of them never cost more.

        Prompts may be served from several subsets of the candidates (`ways`). All are tried, each step at the
        objective's price. Raises InputError for less than 1 graph, and where all are too few for the steps of the
        traffic.
        """
        missing = sorted({graphs for graphs in counts if graphs not in self._chosen})
        if missing and missing[0] < 1:
            raise InputError(f"{missing[0]} {self.candidates.phase} graphs cover nothing; at least 1 is needed")
        best: dict[int, tuple[float, Chosen]] = {}
        for observed in self._observed if missing else []:
            for graphs, found in self._served(observed, missing):
                if graphs not in best or found[0] < best[graphs][0]:
                    best[graphs] = found
        for graphs in missing:
            if graphs not in best:
                raise InputError(
                    f"{graphs} {self.candidates.phase} graphs are too few for the steps of this traffic; allow more"
                )
            self._chosen[graphs] = best[graphs][1]
        return [self._chosen[graphs] for graphs in counts]

    def _served(self, observed: Observed, counts: list[int]) -> Iterator[tuple[int, tuple[float, Chosen]]]:
        """(graphs, (cost of a real token, steps priced, and choice)), without those of `counts` that are too few."""
        phase, demand = self.candidates.phase, observed.demand
        space = observed.candidates.space(self._objective, self.required)
        choices = None
        while counts and choices is None:
            try:
                choices = frontier(space, demand, counts)
            except InputError:
                counts = counts[1:]
        steps = float(demand.weights.sum())
        price = steps * self._objective.step_price(phase)
        real = observed.real
        ragged = observed.exact / real - 1 if real else 0.0
        for graphs, choice in zip(counts, choices or [], strict=True):
            buckets = tuple(Bucket(phase, *point) for point in choice.buckets)
            padded = _padded_tokens(demand.points, demand.weights, buckets, self.candidates.limits)
            padding = padded / real - 1 if real else None
            found = Chosen(buckets, choice.cost, choice.bound, padding, ragged)
            yield graphs, ((choice.cost + price) / max(1.0, real), found)


def _padded_tokens(points: Points, weights: NDArray[np.float64], buckets: tuple[Bucket, ...], limits: Limits) -> float:
    """Tokens that the steps take when each runs in the bucket that lookup would choose."""
    padded = np.full(len(points), np.nan)
    for bucket in sorted(buckets, key=lambda b: (cost(b), b), reverse=True):
        size = np.array(bucket.shape)
        covered = (points <= size).all(axis=1)
        padded[covered] = limits.padded(bucket)
    return float((padded * weights).sum())


COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of graphs tried by default."""


@dataclass(frozen=True)
class FrontierPoint:
    """The best choice of at most `graphs` buckets of each phase."""

    graphs: int
    chosen: Mapping[Phase, Chosen]

    def to_dict(self) -> dict[str, object]:
        """Return the point as a JSON object: per phase graphs chosen, padding, and the gap to the lower bound of the
        cost.
        """
        phases: dict[str, object] = {
            phase: {
                "graphs": len(choice.buckets),
                "padding": choice.padding,
                "ragged_padding": choice.ragged,
                "gap": choice.gap,
            }
            for phase, choice in self.chosen.items()
        }
        return {"graphs": self.graphs, **phases}


def points(problems: Mapping[Phase, PhaseProblem], counts: Sequence[int] = COUNTS) -> list[FrontierPoint]:
    """Return a point for each number of graphs, up to the first at which neither phase can use more."""
    most = max(problem.most for problem in problems.values())
    kept = [graphs for index, graphs in enumerate(counts) if index == 0 or counts[index - 1] < most]
    chosen = {
        phase: problem.choose_each([min(graphs, problem.most) for graphs in kept])
        for phase, problem in problems.items()
    }
    return [
        FrontierPoint(graphs, {phase: choices[index] for phase, choices in chosen.items()})
        for index, graphs in enumerate(kept)
    ]
