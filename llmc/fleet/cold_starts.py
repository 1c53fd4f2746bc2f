"""Cold starts by number of nodes: the time from exec to ready for each way of pulling, and its scaling limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmc.fleet.costs import Cost
from llmc.fleet.simulate import Network, Pull, simulate

DOUBLES = 2.0
"""What of one node's cold start counts as broken, without a bound."""
CLOSE = 1.05
"""How near, as a ratio, the number of nodes is found at which something breaks."""
MIB = 1 << 20


def _registry(cost: Cost, nodes: int, network: Network) -> Pull:
    return Pull(nodes, cost.size, len(cost.layers))


def _before(cost: Cost, nodes: int, network: Network) -> Pull:
    return Pull(nodes, cost.size, len(cost.layers), queued=True)


def _layers(cost: Cost, nodes: int, network: Network) -> Pull:
    return Pull(nodes, cost.size, len(cost.layers), unit=max(cost.layers))


def _chunks(cost: Cost, nodes: int, network: Network) -> Pull:
    peers = network.peers
    unit = math.ceil(peers.chunk_mib * MIB)
    return Pull(nodes, cost.size, len(cost.layers), unit, peers.uploads, peers.seeds, queued=True)


PRE_PULLED = "pre-pulled"
WAYS: Mapping[str, Callable[[Cost, int, Network], Pull]] = {
    "registry": _registry, PRE_PULLED: _before, "peers, layers": _layers, "peers, chunks": _chunks,
}  # fmt: skip
"""Every node from the registry; all of them before, in a queue, so that a start pulls nothing; from nodes that have a
layer whole, as with Spegel; from nodes that have a chunk, as with Dragonfly."""


@dataclass(frozen=True)
class ColdStart:
    """Cold-start times of `nodes` nodes that start together: pull, open, first probe, in seconds from exec to ready.

    `before_s` is the seconds of pulling before that.
    """

    nodes: int
    p50_s: float
    p95_s: float
    p99_s: float
    last_s: float
    before_s: float = 0.0


@dataclass(frozen=True)
class Scale:
    """One bundle, pulled one `way` by more and more nodes, ascending.

    `doubles_at` and `beyond_at` are the least number of nodes, within CLOSE, at which p99 is above twice that of one
    node or above the bound; None where it never is in this range.
    """

    way: str
    starts: tuple[ColdStart, ...]
    doubles_at: int | None
    beyond_at: int | None

    def at(self, nodes: int) -> ColdStart:
        """Return the cold start of a simulated number of nodes."""
        return next(one for one in self.starts if one.nodes == nodes)


def together(costs: Sequence[Cost], way: str, network: Network) -> list[ColdStart]:
    """Simulate all entries at once, each with its replicas, through one registry."""
    pulled = simulate([WAYS[way](one, one.replicas, network) for one in costs], network)
    last = max(float(seconds.max()) for seconds in pulled)
    found = []
    for cost, seconds in zip(costs, pulled, strict=True):
        before = last if way == PRE_PULLED else 0.0
        ready = np.sort(seconds * (way != PRE_PULLED) + cost.start_s)
        p50, p95, p99 = (float(ready[math.ceil(share * len(ready)) - 1]) for share in (0.5, 0.95, 0.99))
        found.append(ColdStart(len(ready), p50, p95, p99, float(ready[-1]), before))
    return found


def scale(cost: Cost, way: str, network: Network, points: Sequence[int], bound_s: float | None) -> Scale:
    """Simulate one entry alone, with 1, each of `points`, and enough further node counts to locate the limits."""
    known: dict[int, ColdStart] = {}

    def p99(nodes: int) -> float:
        if nodes not in known:
            (known[nodes],) = together([replace(cost, replicas=nodes)], way, network)
        return known[nodes].p99_s

    steps = sorted({1, *points})
    for nodes in steps:
        p99(nodes)
    limits = (DOUBLES * p99(1), bound_s)
    doubles, beyond = (None if limit is None else _first_above(p99, steps, limit) for limit in limits)
    return Scale(way, tuple(known[nodes] for nodes in sorted(known)), doubles, beyond)


def _first_above(p99: Callable[[int], float], steps: Sequence[int], limit: float) -> int | None:
    """The least number of nodes whose p99 exceeds `limit`, assuming p99 rises with the nodes; None if even the last's
    does not.
    """
    above = next((at for at, nodes in enumerate(steps) if p99(nodes) > limit), None)
    if above is None or above == 0:
        return None if above is None else steps[0]
    low, high = steps[above - 1], steps[above]
    while high - low > 1 and high / low > CLOSE:
        middle = min(max(round(math.sqrt(low * high)), low + 1), high - 1)
        low, high = (low, middle) if p99(middle) > limit else (middle, high)
    return high
