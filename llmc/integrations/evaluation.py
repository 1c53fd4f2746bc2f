"""Evaluation of a server's graphs on traffic, by its own rules: padding, steps without a graph, graphs, warm-up,
memory.

Padding is (padded − real) / real of a family's own unit: tokens of a step, blocks of the whole batch, requests. It
covers only steps that run in graphs. A step without a graph that runs eagerly, or fails, is only in `misses`. A step
whose graph is compiled during serving is in `misses`, and padded to that graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from llmc.integrations.base import BucketRules, Demands, GraphCost, GraphDemand, GraphFamily, Lists, Miss, Setup, Shape


@dataclass(frozen=True)
class ShapeUse:
    """Usage of one graph: its number of `steps`, and their total `real` and `padded` work."""

    shape: Shape
    steps: int
    real: int
    padded: int


@dataclass(frozen=True)
class FamilyEvaluation:
    """One family on traffic.

    shapes       the given list
    steps        all steps, including those without a graph
    real         units of work of the steps in graphs
    padded       units that their graphs computed
    misses       steps that no prepared graph covered, by the server's reaction
    missed       their shapes with the steps of each, the most frequent first, at most `SHOWN`
    padding_pNN  the least padding that NN% of the steps do not exceed; None without steps
    used         graphs that ran, by shape
    """

    family: GraphFamily
    shapes: tuple[Shape, ...]
    steps: int
    real: int
    padded: int
    misses: Mapping[Miss, int]
    missed: tuple[tuple[Shape, int], ...]
    padding_p50: float | None
    padding_p95: float | None
    used: tuple[ShapeUse, ...]

    @property
    def padding(self) -> float | None:
        """(padded − real) / real; None without real work."""
        return (self.padded - self.real) / self.real if self.real else None

    @property
    def missing(self) -> int:
        """Steps that no prepared graph covered."""
        return sum(self.misses.values())

    @property
    def unused(self) -> tuple[Shape, ...]:
        """The graphs of the list that never ran."""
        ran = {use.shape for use in self.used}
        return tuple(shape for shape in self.shapes if shape not in ran)

    def to_dict(self) -> dict[str, object]:
        """Return the evaluation as a JSON object."""
        return {
            "axes": list(self.family.axes),
            "unit": self.family.unit,
            "graphs": len(self.shapes),
            "steps": self.steps,
            "real": self.real,
            "padded": self.padded,
            "padding": self.padding,
            "padding_p50": self.padding_p50,
            "padding_p95": self.padding_p95,
            "misses": dict(self.misses),
            "missed": [{"shape": list(shape), "steps": steps} for shape, steps in self.missed],
            "unused": [list(shape) for shape in self.unused],
            "used": [asdict(use) | {"shape": list(use.shape)} for use in self.used],
        }


SHOWN = 20
"""Most missed shapes that an evaluation keeps of each family."""


@dataclass(frozen=True)
class ServerEvaluation:
    """Lists on traffic, by the rules of one server.

    `graphs` is the number that it compiles or captures at start. `warmup_seconds` and `graph_bytes` are their published
    costs, None where unpublished. `families` are in the server's order.
    """

    graphs: int
    warmup_seconds: float | None
    graph_bytes: int | None
    families: tuple[FamilyEvaluation, ...]

    @property
    def padding(self) -> dict[str, float | None]:
        """Padding over real work by family; units differ, so there is no total."""
        return {family.family.name: family.padding for family in self.families}

    @property
    def worst(self) -> float:
        """The largest padding of a counted family; 0 without real work."""
        all_padding = (found.padding for found in self.families if found.family.counted)
        return max((padding for padding in all_padding if padding is not None), default=0.0)

    @property
    def missing(self) -> float:
        """The share of steps, 0 to 1, that no prepared graph covered."""
        steps = sum(family.steps for family in self.families)
        return sum(family.missing for family in self.families) / steps if steps else 0.0

    def family(self, name: str) -> FamilyEvaluation:
        """Return the family `name`."""
        return next(found for found in self.families if found.family.name == name)

    def to_dict(self) -> dict[str, object]:
        """Return the evaluation as a JSON object."""
        return {
            "graphs": self.graphs,
            "warmup_seconds": self.warmup_seconds,
            "graph_bytes": self.graph_bytes,
            "padding": self.padding,
            "missing": self.missing,
            "families": {found.family.name: found.to_dict() for found in self.families},
        }


def evaluate(
    server: BucketRules, setup: Setup, lists: Lists, demands: Demands, cost: GraphCost | None = None
) -> ServerEvaluation:
    """Evaluate `lists`, accepted by the server, on `demands`; each distinct shape is looked up once, in order.

    `cost` is a graph's start-up cost, replacing the published one.
    """
    graphs = server.graphs(setup, lists)
    cost = cost or server.cost
    return ServerEvaluation(
        graphs,
        None if cost.seconds is None else graphs * cost.seconds,
        None if cost.size is None else graphs * cost.size,
        tuple(_family(server, setup, family, lists, demands.get(family.name, {})) for family in server.families),
    )


def _family(
    server: BucketRules, setup: Setup, family: GraphFamily, lists: Lists, demands: Mapping[Shape, GraphDemand]
) -> FamilyEvaluation:
    shapes = lists[family.name]
    finder = server.finder(setup, family.name, shapes)
    used: dict[Shape, list[int]] = {}
    misses: dict[Miss, int] = {}
    missed: dict[Shape, int] = {}
    all_padding: list[tuple[float, int]] = []
    for shape, demand in demands.items():
        found = finder.find(shape)
        if found.miss is not None:
            misses[found.miss] = misses.get(found.miss, 0) + demand.steps
            missed[shape] = missed.get(shape, 0) + demand.steps
            if found.miss != "compile":
                continue
        ran = found.shape if found.miss is None else tuple(map(max, found.shape, shape))
        padded = server.work(setup, family.name, ran) * demand.steps
        known = used.setdefault(ran, [0, 0, 0])
        known[0] += demand.steps
        known[1] += demand.real
        known[2] += padded
        all_padding.append(((padded - demand.real) / max(demand.real, 1), demand.steps))
    all_padding.sort()
    return FamilyEvaluation(
        family,
        shapes,
        sum(demand.steps for demand in demands.values()),
        sum(use[1] for use in used.values()),
        sum(use[2] for use in used.values()),
        misses,
        tuple(sorted(missed.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]),
        _percentile(all_padding, 0.50),
        _percentile(all_padding, 0.95),
        tuple(ShapeUse(shape, *counts) for shape, counts in sorted(used.items())),
    )


def _percentile(all_padding: list[tuple[float, int]], share: float) -> float | None:
    """The least padding that `share` of the steps do not exceed; `all_padding` ascending, each with its steps."""
    total = sum(steps for _, steps in all_padding)
    seen = 0
    for padding, steps in all_padding:
        seen += steps
        if seen >= share * total:
            return padding
    return None
