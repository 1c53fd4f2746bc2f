"""Shifts of recorded traffic: what a server's steps would be if requests were longer, shorter, closer together, or at
random. Plans are judged under them, and hedged against them (tune.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from llmc.buckets.traffic.admission import Admission
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.integrations.base import BucketRules, Demands, GraphDemand, Setup, collect

UNIFORM = "uniform steps"

SCALE = 10**12
"""Real work of recorded traffic in a mixture, in units that leave shares exact enough as whole numbers."""


def _times(factor: float, request: TrafficRequest) -> TrafficRequest:
    prompt, output = (max(1, round(tokens * factor)) for tokens in (request.prompt, request.output))
    return TrafficRequest(request.time, prompt, output, min(round(request.cached * factor), prompt - 1))


def _closer(request: TrafficRequest) -> TrafficRequest:
    return request._replace(time=request.time / 2)


SHIFTS: Mapping[str, Callable[[TrafficRequest], TrafficRequest]] = MappingProxyType({
    "lengths × 0.5": partial(_times, 0.5),
    "lengths × 2": partial(_times, 2.0),
    "arrivals × 2": _closer,
})  # fmt: skip
"""Name to the change of each request: its tokens, or its arrival time."""


def shifted(
    server: BucketRules, setup: Setup, requests: Sequence[TrafficRequest], step_time: StepTime
) -> dict[str, Demands]:
    """Return the steps of `server` under each of `SHIFTS` of `requests`, and uniform steps, by the shift's name.

    Changed requests are cut to the limits. Requests that all arrive at once have no rate to double. Uniform steps are
    of all sizes that the server's own lists reach, each equally often (`BucketRules.uniform`).
    """
    found: dict[str, Demands] = {}
    timed = any(request.time for request in requests)
    for name, shift in SHIFTS.items():
        if requests and (timed or shift is not _closer):
            changed = Admission(setup.limits, clip=True)(map(shift, requests))
            found[name] = collect(server.demands(setup, changed, step_time))
    found[UNIFORM] = collect(server.uniform(setup, server.default(setup)))
    return found


def mixture(
    demands: Demands, shifts: Mapping[str, Demands], weights: Mapping[str, Mapping[str, float]]
) -> Demands:  # fmt: skip
    """Return `demands` and `shifts` as one, the latter with their `weights` by family and shift.

    With a weight of 1, the padding overhead of a shift counts as much as that of `demands`.
    """
    return collect(_weighted(demands, shifts, weights))


def _weighted(
    demands: Demands, shifts: Mapping[str, Demands], weights: Mapping[str, Mapping[str, float]]
) -> Iterator[GraphDemand]:
    for family in dict.fromkeys([*demands, *weights]):
        named = weights.get(family, {})
        for part, weight in [(demands, 1.0), *((shifts[name], weight) for name, weight in named.items())]:
            found = part.get(family, {}).values()
            real = sum(demand.real for demand in found)
            for demand in found if real and weight else ():
                scaled = [max(1, round(count * SCALE * weight / real)) for count in (demand.steps, demand.real)]
                yield GraphDemand(family, demand.shape, *scaled)
