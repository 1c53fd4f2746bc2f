"""From traffic to a server's lists: its own lists and better ones, on the same steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from llmc.buckets.plan import Fact
from llmc.errors import InputError
from llmc.integrations.base import BucketRules, Demands, GraphCost, Lists, Setup
from llmc.integrations.evaluation import ServerEvaluation, evaluate
from llmc.integrations.observed import ObservedSteps
from llmc.integrations.plan import ServerPlan

ROUNDS = 8
"""Most proposals until one fits the budget."""
NEAR = 0.05
"""Share of the allowed graphs that a proposal may leave unused before another is tried."""


@dataclass(frozen=True)
class ServerBudget:
    """Limits on graphs, seconds of warm-up and bytes of graphs at start; None means no limit."""

    graphs: int | None = None
    warmup_seconds: float | None = None
    graph_bytes: int | None = None

    def most(self, cost: GraphCost) -> int | None:
        """Return the most graphs within the budget at `cost` per graph; None without a limit.

        Raises InputError for a limit on seconds or bytes where a graph's cost is unknown.
        """
        found = [] if self.graphs is None else [self.graphs]
        for bound, each, flag, what in (
            (self.warmup_seconds, cost.seconds, "--graph-seconds", "warm-up time"),
            (self.graph_bytes, cost.size, "--graph-bytes", "graph memory"),
        ):
            if bound is not None:
                if each is None:
                    raise InputError(f"a bound on {what} needs what one graph takes ({cost.source}): give {flag}")
                found.append(int(bound // each))
        if found and min(found) < 1:
            raise InputError("the budget allows no graph at all; raise it")
        return min(found, default=None)


@dataclass(frozen=True)
class Tuned:
    """A plan for a server, and the server's own lists, evaluated on the same demands."""

    plan: ServerPlan
    chosen: ServerEvaluation
    default_lists: Lists
    default: ServerEvaluation


def tune(
    server: BucketRules, setup: Setup, demands: Demands, budget: ServerBudget, cost: GraphCost | None = None,
    facts: Mapping[str, Fact] | None = None,
) -> Tuned:  # fmt: skip
    """Return the lists of least padding on `demands`, within `budget`; by default, as many graphs as the server's own.

    `facts` of the traffic go into the plan. Raises InputError where no lists fit the budget.
    """
    cost = cost or server.cost
    own = server.default(setup)
    before = evaluate(server, setup, own, demands, cost)
    most = budget.most(cost) or before.graphs
    lists = _within(server, setup, demands, {name: len(shapes) for name, shapes in own.items()}, most, before.graphs)
    after = evaluate(server, setup, lists, demands, cost)
    return Tuned(ServerPlan(server.name, setup, lists, "traffic", facts or {}), after, own, before)


def ends(
    server: BucketRules, setup: Setup, lists: Mapping[str, Lists], observed: ObservedSteps
) -> dict[str, list[ServerEvaluation]]:
    """Return evaluations of each of `lists`, by name, with lengths at either end of their intervals; empty if known."""
    return {
        name: [evaluate(server, setup, each, demands) for demands in observed.ends]
        for name, each in lists.items()
        if observed.ends
    }


def _within(
    server: BucketRules, setup: Setup, demands: Demands, counts: Mapping[str, int], most: int, graphs: int,
) -> Lists:  # fmt: skip
    """A proposal of at most `most` graphs. Families share them as in `counts`, whose total is `graphs`, but have no
    fewer than they need.

    The number of graphs follows from the lists by the server's own rule. The share is therefore found by trial: lowered
    by the excess, and raised while more than NEAR of the allowed graphs would stay unused.
    """
    least = dict.fromkeys(counts, 1)
    share, enough, too_much = most / max(graphs, 1), 0.0, math.inf
    best: Lists | None = None
    used = 0
    tried = set[tuple[int, ...]]()
    for _ in range(ROUNDS):
        wanted = {name: max(least[name], round(count * share)) for name, count in counts.items()}
        if tuple(wanted.values()) in tried:
            break
        tried.add(tuple(wanted.values()))
        try:
            lists = server.propose(setup, demands, wanted)
        except InputError:
            if max(least.values()) > 1:
                raise
            least = _least(server, setup, counts)
            continue
        built = server.graphs(setup, lists)
        if built <= most:
            if most - built <= most * NEAR or (built == used and too_much == math.inf):
                return lists
            enough = share
            if built > used:
                best, used = lists, built
        else:
            too_much = share
        if too_much == math.inf:
            share *= max(1.05, most / built)
        elif best is None:
            share *= min(0.95, most / built)
        else:
            share = (enough + too_much) / 2
    if best is None:
        raise InputError(f"no lists of at most {most} graphs were found for {server.name}; allow more")
    return best


def _least(server: BucketRules, setup: Setup, counts: Mapping[str, int]) -> dict[str, int]:
    """The fewest shapes of each family that the server's look-up needs."""

    def enough(name: str, count: int) -> bool:
        try:
            server.propose(setup, {}, {**counts, name: count})
        except InputError:
            return False
        return True

    return {name: bisect_left(range(1, count), True, key=partial(enough, name)) + 1 for name, count in counts.items()}
