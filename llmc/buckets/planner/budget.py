"""Limits on a plan's cost, and each phase's share of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.planner.choice import Chosen, PhaseProblem
from llmc.errors import InputError

DEFAULT_MAX_GRAPHS = 32
"""Graphs of each phase that the traffic strategy chooses without a budget."""

MOST_GRAPHS = 512
"""The most graphs of each phase that a budget in padding, time or memory considers."""


@dataclass(frozen=True)
class Budget:
    """Upper bounds; None means no bound.

    max_graphs         buckets of each phase, at least 1
    max_padding        padding that buckets add to (padded − real) / real of each phase, in tokens, on the planned
                       traffic; excludes the padding that unequal lengths in one step cause in any bucket
    max_compile_time   seconds to compile every graph of the plan
    max_graph_memory   bytes that the graphs of the plan take on the device

    Raises InputError for any other number.
    """

    max_graphs: int | None = None
    max_padding: float | None = None
    max_compile_time: float | None = None
    max_graph_memory: int | None = None

    def __post_init__(self) -> None:
        for bound in fields(self):
            value = getattr(self, bound.name)
            if value is not None and not value >= 0:
                raise InputError(f"{flag(bound.name)} {value} must not be negative")
        if self.max_graphs is not None and self.max_graphs < 1:
            raise InputError(
                f"--max-graphs {self.max_graphs} covers nothing: the smallest plan has 1 graph of each phase"
            )

    @property
    def needs_graph_costs(self) -> bool:
        """Whether a bound limits graph costs on a device."""
        return self.max_compile_time is not None or self.max_graph_memory is not None

    def given(self) -> list[str]:
        """Return the bounds that are set, spelled as flags."""
        return [flag(bound.name) for bound in fields(self) if getattr(self, bound.name) is not None]


def flag(name: str) -> str:
    """Return a bound's command line spelling."""
    return f"--{name.replace('_', '-')}"


class GraphCosts(Protocol):
    """Graph costs on a device, estimated or measured."""

    def compile_seconds(self, buckets: Sequence[Bucket]) -> float:
        """Return the seconds to compile all of them."""
        ...

    def graph_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Return the bytes that all of them take on the device, without weights and KV cache."""
        ...


Problems = Mapping[Phase, PhaseProblem]


def spend(budget: Budget, problems: Problems, costs: GraphCosts | None, default: int) -> dict[Phase, Chosen]:
    """Return the best choice for each phase within `budget`; `default` graphs of a phase where it sets no bound.

    Raises InputError that states the smallest sufficient budget, or the bounds that contradict each other.
    """
    if budget.needs_graph_costs and costs is None:
        raise InputError("a budget of compile time or graph memory needs a model: give MODEL or --config FILE")
    if budget.max_padding is not None:
        goal = budget.max_padding
        chosen = {phase: _least_graphs(problem, budget, goal) for phase, problem in problems.items()}
        excess = _excess(budget, chosen, costs)
        if excess:
            graphs = " and ".join(f"{len(choice.buckets)} {phase}" for phase, choice in chosen.items())
            raise InputError(
                f"--max-padding {budget.max_padding:.1%} needs {graphs} graphs, and {excess}; raise one of the two"
            )
        return chosen
    most = budget.max_graphs or (MOST_GRAPHS if budget.given() else default)
    chosen = {phase: problem.choose(min(most, problem.most)) for phase, problem in problems.items()}
    if not _excess(budget, chosen, costs):
        return chosen
    return _largest_that_fits(budget, problems, costs, most)


def _least_graphs(problem: PhaseProblem, budget: Budget, goal: float) -> Chosen:
    """The fewest graphs of a phase that keep its padding within `goal`."""
    most = min(problem.most, budget.max_graphs or MOST_GRAPHS)

    def enough(graphs: int) -> bool:
        return problem.choose(graphs).added <= goal

    high = 1
    while high < most and not enough(high):
        high = min(2 * high, most)
    if not enough(high):
        least = problem.choose(high).added
        allowed = f"--max-graphs {budget.max_graphs}" if budget.max_graphs else f"{most} graphs"
        lengths = "--prompt-seq" if problem.candidates.phase == "prompt" else "--decode-seq"
        raise InputError(
            f"no {problem.candidates.phase} plan of {allowed} adds {goal:.1%} padding or less on this traffic: the "
            f"least is {least:.1%}; raise --max-padding{' or --max-graphs' if budget.max_graphs else ''}, or let "
            f"buckets lie closer with a smaller step of {lengths}"
        )
    low = high // 2 + 1
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return problem.choose(high)


def _largest_that_fits(budget: Budget, problems: Problems, costs: GraphCosts | None, most: int) -> dict[Phase, Chosen]:
    """The choice of least padding, both phases together, among numbers of graphs that the budget allows."""
    ladder = {phase: _ladder(min(most, problem.most)) for phase, problem in problems.items()}
    for phase, problem in problems.items():
        problem.choose_each(ladder[phase])
    smallest = {phase: problem.choose(1) for phase, problem in problems.items()}
    excess = _excess(budget, smallest, costs)
    if excess:
        raise InputError(f"the smallest plan, 1 graph of each phase, already takes more than allowed: {excess}")
    phases = list(problems)
    best, at = smallest, dict.fromkeys(phases, 0)
    while True:
        steps: list[tuple[float, Phase, dict[Phase, Chosen]]] = []
        for phase in phases:
            if at[phase] + 1 < len(ladder[phase]):
                larger = problems[phase].choose(ladder[phase][at[phase] + 1])
                trial = {**best, phase: larger}
                if not _excess(budget, trial, costs):
                    graphs = len(larger.buckets) - len(best[phase].buckets)
                    gain = best[phase].added - larger.added
                    steps.append((-gain / max(1, graphs), phase, trial))
        if not steps:
            break
        _, phase, best = min(steps, key=lambda step: (step[0], PHASES.index(step[1])))
        at[phase] += 1
    for phase in phases:
        rungs = [*ladder[phase], min(most, problems[phase].most) + 1]
        low, high = rungs[at[phase]], rungs[at[phase] + 1] - 1
        while low < high:
            middle = (low + high + 1) // 2
            trial = {**best, phase: problems[phase].choose(middle)}
            if _excess(budget, trial, costs):
                high = middle - 1
            else:
                low, best = middle, trial
    return best


def _ladder(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 … up to `most`."""
    rungs = {most, 1}
    power = 1
    while power <= most:
        rungs |= {power, power * 3 // 2}
        power *= 2
    return sorted(rung for rung in rungs if 1 <= rung <= most)


def _excess(budget: Budget, chosen: Mapping[Phase, Chosen], costs: GraphCosts | None) -> str:
    """Name the exceeded bounds; empty when none is."""
    if costs is None:
        return ""
    buckets = [bucket for choice in chosen.values() for bucket in choice.buckets]
    found = []
    if budget.max_compile_time is not None and (seconds := costs.compile_seconds(buckets)) > budget.max_compile_time:
        found.append(
            f"compiling takes about {seconds:,.0f} s, above --max-compile-time {budget.max_compile_time:,.0f} s"
        )
    if budget.max_graph_memory is not None and (size := costs.graph_bytes(buckets)) > budget.max_graph_memory:
        most = budget.max_graph_memory / 2**20
        found.append(f"graphs take about {size / 2**20:,.0f} MiB, above --max-graph-memory {most:,.0f} MiB")
    return " and ".join(found)
