"""From traffic to a server's lists: its own lists and better ones, on the same steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations

from llmc.buckets.plan import Fact
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from llmc.integrations.base import BucketRules, Demands, GraphCost, Lists, Setup
from llmc.integrations.evaluation import ServerEvaluation, evaluate
from llmc.integrations.observed import ObservedSteps, TrafficSource, parts
from llmc.integrations.plan import ServerPlan
from llmc.integrations.shifts import mixture, shifted

ROUNDS = 8
"""Most proposals until one fits the budget."""
SHARING_WEIGHT = 0.05
"""Weight of each shift where graphs are shared out among families."""
SMALLEST_MOVE, GAIN = 8, 0.0005
"""The smallest part of a family's graphs that moves to another family is one in this many; and the least gain."""
HEDGES = 14
"""Most proposals until a plan is hedged."""
SHRINK, FALL = 0.6, 0.85
"""Factors by which weights of shifts fall: all of a family that cost too much, and those that need none."""
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


OnPlan = Callable[[], None]
MOST_PRICE = 0.02
"""Most padding overhead, as a share of the real work, that a hedge adds on the traffic itself unless it is given. It
also adds at most half of what the plan gains there."""
FIRST_WEIGHT = 0.005
"""The least weight of a shift under which a plan is worse than the server's own lists; it doubles while that holds."""


@dataclass(frozen=True)
class Tuned:
    """A plan for a server, and the server's own lists, evaluated on the same demands.

    shifts    evaluations of the server's own lists and of the plan under each shift, by its name
    held_out  the same on each later part of the traffic, of the server's own lists and of a plan for its first half
    weights   weights of the shifts in the plan, by family and shift; 1 counts as much as the traffic itself
    unhedged  the plan for the traffic alone
    """

    plan: ServerPlan
    chosen: ServerEvaluation
    default_lists: Lists
    default: ServerEvaluation
    unhedged: ServerEvaluation
    shifts: Mapping[str, tuple[ServerEvaluation, ServerEvaluation]]
    weights: Mapping[str, Mapping[str, float]]
    held_out: Mapping[str, tuple[ServerEvaluation, ServerEvaluation]] = field(default_factory=dict)

    def on(
        self, server: BucketRules, demands: Demands, cost: GraphCost | None
    ) -> tuple[ServerEvaluation, ServerEvaluation]:
        """Evaluate the server's own lists, and the plan's, on other `demands`."""
        setup = self.plan.setup
        return (
            evaluate(server, setup, self.default_lists, demands, cost),
            evaluate(server, setup, self.plan.lists, demands, cost),
        )

    @property
    def price(self) -> dict[str, float]:
        """Padding overhead that the hedge adds on the traffic itself, by family."""
        return {family: _excess(self.unhedged, self.chosen, family) for family in self.weights}

    @property
    def worse(self) -> dict[str, list[str]]:
        """Families, by shift, that the plan pads more than the server's own lists do."""
        found = {name: [family for family in self.weights if _excess(*pair, family) > ALIKE]
                 for name, pair in self.shifts.items()}  # fmt: skip
        return {name: families for name, families in found.items() if families}


def tune(
    server: BucketRules, setup: Setup, demands: Demands, budget: ServerBudget, cost: GraphCost | None = None,
    facts: Mapping[str, Fact] | None = None, shifts: Mapping[str, Demands] | None = None, hedge: float | None = None,
    on_plan: OnPlan | None = None,
) -> Tuned:  # fmt: skip
    """Return the lists of least padding on `demands`, within `budget`; by default, as many graphs as the server's own.

    `hedge` is the share of the objective, from 0 to below 1, that `shifts` have together, in equal parts. Without it,
    each shift has the least weight with which the plan pads it no more than the server's own lists do, as far as that
    costs no more than MOST_PRICE on `demands`. `facts` of the traffic go into the plan; `on_plan` is called before each
    proposal. Raises InputError where no lists fit the budget, and for another `hedge`.
    """
    if hedge is not None and not 0 <= hedge < 1:
        raise InputError(f"a hedge is a share from 0 to below 1, not {hedge:g}")
    cost, shifts = cost or server.cost, shifts or {}
    own = server.default(setup)
    before = evaluate(server, setup, own, demands, cost)
    most = budget.most(cost) or before.graphs
    counts = {name: len(listed) for name, listed in own.items()}

    weights: dict[str, dict[str, float]] = {family.name: {} for family in server.families if family.counted}
    robust = mixture(demands, shifts, {name: dict.fromkeys(shifts, SHARING_WEIGHT) for name in weights})
    shares = _balanced(server, setup, robust, *_within(server, setup, robust, counts, most, before.graphs), most, own)

    def planned(demands: Demands) -> Lists:
        if on_plan is not None:
            on_plan()
        lists = server.propose(setup, demands, shares)
        if most * (1 - NEAR) <= server.graphs(setup, lists) <= most:
            return lists
        try:
            return _within(server, setup, demands, shares, most, most)[0]
        except InputError:
            return _within(server, setup, demands, counts, most, before.graphs)[0]

    plain = planned(demands)
    owns = {name: evaluate(server, setup, own, one, cost) for name, one in shifts.items()}
    if hedge is None:
        lists, weights = _Hedging(server, setup, demands, shifts, before, owns, planned).run(plain, weights)
        if server.graphs(setup, lists) > most:
            lists = planned(mixture(demands, shifts, weights))
    elif hedge and shifts:
        each = hedge / (1 - hedge) / len(shifts)
        weights = {name: dict.fromkeys(shifts, each) for name in weights}
        lists = planned(mixture(demands, shifts, weights))
    else:
        lists = plain
    return Tuned(
        ServerPlan(server.name, setup, lists, "traffic", facts or {}),
        evaluate(server, setup, lists, demands, cost),
        own,
        before,
        evaluate(server, setup, plain, demands, cost),
        {name: (owns[name], evaluate(server, setup, lists, one, cost)) for name, one in shifts.items()},
        weights,
    )


ALIKE = 1e-9
"""Difference of two padding overheads that is none."""


def _excess(less: ServerEvaluation, more: ServerEvaluation, family: str) -> float:
    """The padding overhead of a family in `more`, less that in `less`; 0 without real work."""
    padding, base = more.family(family).padding, less.family(family).padding
    return 0.0 if padding is None or base is None else padding - base


@dataclass(frozen=True)
class _Hedging:
    """The search for weights of shifts, each family by itself, with which no shift is padded more than by `owns`.

    A shift's weight doubles while the plan pads it more, and falls slowly while it does not. All weights of a family
    fall while the plan costs more than MOST_PRICE, or half of what it gains over `before`, the server's own lists.
    Where no plan is as good as the server's own under every shift, the one with the least excess is kept.
    """

    server: BucketRules
    setup: Setup
    demands: Demands
    shifts: Mapping[str, Demands]
    before: ServerEvaluation
    owns: Mapping[str, ServerEvaluation]
    planned: Callable[[Demands], Lists]

    def run(self, plain: Lists, families: Collection[str]) -> tuple[Lists, dict[str, dict[str, float]]]:
        """Return lists, and weights by family and shift; `plain` are the lists without any."""
        base = evaluate(self.server, self.setup, plain, self.demands)
        limits = {name: min(MOST_PRICE, max(0.0, -_excess(self.before, base, name) / 2)) for name in families}
        weights: dict[str, dict[str, float]] = {name: {} for name in families}
        kept, accepted, least = dict(plain), dict(weights), dict.fromkeys(weights, math.inf)
        open_, lists = list(weights), plain
        for _ in range(HEDGES):
            after = evaluate(self.server, self.setup, lists, self.demands)
            shifted = {name: evaluate(self.server, self.setup, lists, one) for name, one in self.shifts.items()}
            for name in list(open_):
                excess = {shift: _excess(self.owns[shift], one, name) for shift, one in shifted.items()}
                most, known = max(excess.values(), default=0.0), weights[name]
                if _excess(base, after, name) > limits[name]:
                    weights[name] = {shift: weight * SHRINK for shift, weight in known.items()}
                    continue
                if most < least[name]:
                    kept[name], accepted[name], least[name] = lists[name], known, most
                if most <= ALIKE:
                    open_.remove(name)
                    continue
                weights[name] = {
                    shift: max(FIRST_WEIGHT, 2 * known.get(shift, 0.0)) if over > ALIKE else FALL * known[shift]
                    for shift, over in excess.items()
                    if over > ALIKE or shift in known
                }
            if not open_:
                break
            lists = self.planned(mixture(self.demands, self.shifts, weights))
        return kept, accepted


def tune_on(
    server: BucketRules, setup: Setup, source: TrafficSource, observed: ObservedSteps, budget: ServerBudget,
    cost: GraphCost | None = None, hedge: float | None = None, on_plan: OnPlan | None = None,
) -> Tuned:  # fmt: skip
    """Tune on the traffic `observed` in `source`, and judge a plan for its first half on the rest.

    Shifts are of the first MOST_KEPT requests. Raises like `tune`.
    """

    def tuned(demands: Demands, requests: Sequence[TrafficRequest], facts: Mapping[str, Fact]) -> Tuned:
        shifts = shifted(server, setup, requests, AssumedStepTime())
        return tune(server, setup, demands, budget, cost, facts, shifts, hedge, on_plan)

    whole = tuned(observed.demands, observed.requests, observed.facts)
    found = parts(server, setup, source, observed)
    if len(found) < 2:
        return whole
    half = tuned(found[0].demands, observed.requests[: found[0].requests], {})

    return replace(whole, held_out={part.name: half.on(server, part.demands, cost) for part in found[1:]})


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
) -> tuple[Lists, dict[str, int]]:  # fmt: skip
    """A proposal of at most `most` graphs, and the numbers of shapes that it was asked for.

    Families share them as in `counts`, whose total is `graphs`, but have no fewer than they need. The number of graphs
    follows from the lists by the server's own rule. The share is therefore found by trial: lowered by the excess, and
    raised while more than NEAR of the allowed graphs would stay unused.
    """
    least = dict.fromkeys(counts, 1)
    share, enough, too_much = most / max(graphs, 1), 0.0, math.inf
    best: tuple[Lists, dict[str, int]] | None = None
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
                return lists, wanted
            enough = share
            if built > used:
                best, used = (lists, wanted), built
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


def _balanced(
    server: BucketRules, setup: Setup, demands: Demands, lists: Lists, wanted: dict[str, int], most: int, own: Lists
) -> dict[str, int]:
    """Numbers of shapes by family, for `lists` within `most` graphs that were asked for as `wanted`.

    Graphs move from one family to another while that lowers the sum of their padding overheads: first a quarter of a
    family's, later fewer. No family gives so many away that it pads more than in `own`, the server's own lists.
    """
    families = [family.name for family in server.families if family.counted and demands.get(family.name)]

    def padding(lists: Lists) -> dict[str, float]:
        found = evaluate(server, setup, lists, demands)
        return {name: found.family(name).padding or 0.0 for name in families}

    allowed, now, part = padding(own), padding(lists), 4
    while part <= SMALLEST_MOVE:
        for source, target in permutations(families, 2):
            moved = len(lists[source]) // part
            trial = {**wanted, source: len(lists[source]) - moved, target: len(lists[target]) + moved}
            found = _proposed(server, setup, demands, trial) if moved else None
            if found is None or server.graphs(setup, found) > most:
                continue
            after = padding(found)
            gains = sum(after.values()) < sum(now.values()) - GAIN
            if gains and after[source] <= max(allowed[source], now[source]):
                lists, wanted, now = found, trial, after
                break
        else:
            part *= 2
    return {name: min(count, len(lists[name])) for name, count in wanted.items()}


def _proposed(server: BucketRules, setup: Setup, demands: Demands, wanted: Mapping[str, int]) -> Lists | None:
    """The server's proposal; None where so few shapes do not reach every step."""
    try:
        return server.propose(setup, demands, wanted)
    except InputError:
        return None


def _least(server: BucketRules, setup: Setup, counts: Mapping[str, int]) -> dict[str, int]:
    """The fewest shapes of each family that the server's look-up needs."""

    def enough(name: str, count: int) -> bool:
        return _proposed(server, setup, {}, {**counts, name: count}) is not None

    return {name: bisect_left(range(1, count), True, key=partial(enough, name)) + 1 for name, count in counts.items()}
