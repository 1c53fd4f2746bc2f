"""The plan of a fleet: cold starts by number of nodes for each way of pulling, as values and as a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from llmc.buckets.render.text import table
from llmc.fleet.description import Cost
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
    """The least number of nodes whose p99, which rises with the nodes, exceeds `limit`; None if not even the last's."""
    above = next((at for at, nodes in enumerate(steps) if p99(nodes) > limit), None)
    if above is None or above == 0:
        return None if above is None else steps[0]
    low, high = steps[above - 1], steps[above]
    while high - low > 1 and high / low > CLOSE:
        middle = min(max(round(math.sqrt(low * high)), low + 1), high - 1)
        low, high = (low, middle) if p99(middle) > limit else (middle, high)
    return high


POINTS = (10, 100, 1_000, 10_000)
"""Default numbers of nodes that pull one bundle."""


@dataclass(frozen=True)
class FleetPlan:
    """`together`: the entries started at once, by way; `scales`: each entry alone, by way, at `points` nodes."""

    costs: tuple[Cost, ...]
    network: Network
    bound_s: float | None
    points: tuple[int, ...]
    together: Mapping[str, Sequence[ColdStart]]
    scales: Sequence[Sequence[Scale]]

    @property
    def compile_s(self) -> float:
        """Seconds to compile all, one after another on a host like this."""
        return sum(one.compile_s for one in self.costs)

    @property
    def blobs(self) -> Mapping[str, int]:
        """The stored blobs, each once."""
        return {blob: size for one in self.costs for blob, size in one.blobs.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a JSON object; seconds and bytes."""
        return {
            "entries": [
                {**asdict(cost), "basis": cost.basis, "size": cost.size, "blobs": len(cost.blobs),
                 "scales": [asdict(one) for one in scales]}
                for cost, scales in zip(self.costs, self.scales, strict=True)
            ],
            "compile_s": self.compile_s,
            "artifact_bytes": sum(self.blobs.values()),
            "artifact_bytes_unshared": sum(sum(one.blobs.values()) for one in self.costs),
            "together": {way: [asdict(one) for one in starts] for way, starts in self.together.items()},
            "max_cold_start_s": self.bound_s,
            "network": asdict(self.network),
        }  # fmt: skip

    def text(self) -> str:
        """Return the report, ending in a newline."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from table([_COSTS, *map(_cost_row, self.costs)], right=range(2, 10))
        yield ""
        whole, alone = sum(self.blobs.values()), sum(sum(one.blobs.values()) for one in self.costs)
        yield f"compile time: {_hours(self.compile_s)} in all, one after another on a host like this"
        yield f"artifacts: {_size(whole)}; {_size(alone - whole)} more if entries shared no blob"
        for cost in self.costs:
            yield f"{cost.label}: compile time {cost.source}"
            for word, known in (("measured", True), ("estimated", False)):
                names = [name for name, is_known in cost.measured.items() if is_known is known]
                if names:
                    yield f"  {word}: {', '.join(names)}"
        yield ""
        yield f"{sum(one.replicas for one in self.costs):,} nodes at once, from exec to ready:"
        rows: list[tuple[str, ...]] = [("entry", "nodes", "way", "p50", "p95", "p99", "last", "pulled before")]
        for way, starts in self.together.items():
            for cost, start in zip(self.costs, starts, strict=True):
                before = _time(start.before_s) if way == PRE_PULLED else ""
                times = (start.p50_s, start.p95_s, start.p99_s, start.last_s)
                rows.append((cost.label, f"{start.nodes:,}", way, *map(_time, times), before))
        yield from table(rows, right=(1, 3, 4, 5, 6, 7))
        for cost, scales in zip(self.costs, self.scales, strict=True):
            yield ""
            yield f"{cost.label}, {_size(cost.size)}, pulled by so many nodes at once: p99 from exec to ready"
            yield from table(list(self._scale_rows(scales)), right=range(1, 9))
        yield ""
        registry, nodes = self.network.registry, self.network.nodes
        yield (
            f"simulated: a registry of {registry.gbit_per_s:g} Gbit/s and {registry.connections:,} connections, nodes "
            f"of {nodes.gbit_per_s:g} Gbit/s that begin within {nodes.spread_s:g} s, seed {self.network.seed}"
        )

    def _scale_rows(self, scales: Sequence[Scale]) -> Iterator[tuple[str, ...]]:
        bound = () if self.bound_s is None else (f"above {_time(self.bound_s)} at",)
        yield "way", "1", *(f"{nodes:,}" for nodes in self.points), "doubles at", *bound
        for one in scales:
            limits = [one.doubles_at] if self.bound_s is None else [one.doubles_at, one.beyond_at]
            times = (_time(one.at(nodes).p99_s) for nodes in (1, *self.points))
            most = f"over {max(self.points):,}"
            yield one.way, *times, *(most if nodes is None else f"{nodes:,} nodes" for nodes in limits)


_COSTS = ("entry", "device", "nodes", "graphs", "compile", "", "to pull", "host memory", "its own", "open and probe")


def plan_fleet(
    costs: Sequence[Cost], network: Network, bound_s: float | None, points: Sequence[int],
    done: Callable[[str, int, int], None],
) -> FleetPlan:  # fmt: skip
    """Simulate the entries at once, and each alone at `points`; `done(what, step, steps)` is called for each step."""
    steps = len(WAYS) * (1 + len(costs))
    at_once, scales, step = {}, [], 0
    for way in WAYS:
        at_once[way] = together(costs, way, network)
        done(f"all at once, {way}", step := step + 1, steps)
    for cost in costs:
        found = []
        for way in WAYS:
            found.append(scale(cost, way, network, points, bound_s))
            done(f"{cost.label}, {way}", step := step + 1, steps)
        scales.append(found)
    return FleetPlan(tuple(costs), network, bound_s, tuple(sorted({*points} - {1})), at_once, scales)


def _cost_row(cost: Cost) -> tuple[str, ...]:
    return (
        cost.name, cost.device, f"{cost.replicas:,}", f"{cost.executables:,}", _hours(cost.compile_s), cost.basis,
        _size(cost.size), _size(cost.host_bytes), _size(cost.device_bytes) if cost.device_bytes else "",
        _time(cost.start_s),
    )  # fmt: skip


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h"


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s"
