"""What tests of every server judge its proposals and its look-ups by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.integrations.base import BucketRules, Export, GraphDemand, Lists, Setup, Shape
from llmc.integrations.settings import Value, complete


def setup(server: BucketRules, limits: Mapping[str, int], own: Mapping[str, Value] | None = None) -> Setup:
    return Setup(server.limits(limits), complete(server.settings, own or {}))


def values(shapes: Sequence[Shape]) -> list[int]:
    return [value for (value,) in shapes]


def shapes(*numbers: int) -> tuple[Shape, ...]:
    return tuple((number,) for number in numbers)


def counted(family: str, counts: Mapping[int, int]) -> dict[Shape, GraphDemand]:
    return {(value,): GraphDemand(family, (value,), steps, value * steps) for value, steps in counts.items()}


def steps(server: BucketRules, built: Setup, *requests: tuple[float, int, int]) -> list[tuple[str, int, int, int]]:
    """(family, number, steps, real) of the steps for requests of (arrival, prompt, output)."""
    traffic = [TrafficRequest(*request) for request in requests]
    return [
        (family, number, count, real)
        for family, (number,), count, real in server.demands(built, traffic, AssumedStepTime())
    ]


def padded(server: BucketRules, built: Setup, demands: Mapping[Shape, GraphDemand], chosen: Sequence[Shape]) -> int:
    """Work of `demands` in the graphs `chosen`; every step must find one."""
    total = 0
    for shape, demand in demands.items():
        finder = server.finder(built, demand.family, chosen)
        found = finder.find(shape)
        assert found.miss is None, (shape, chosen)
        total += server.work(built, demand.family, found.shape) * demand.steps
    return total


def best(
    server: BucketRules, built: Setup, demands: Mapping[Shape, GraphDemand], candidates: Sequence[int], most: int
) -> int:
    """The least work of at most `most` of `candidates`, the last one always among them, by trying all."""
    *others, top = candidates
    return min(
        padded(server, built, demands, shapes(*chosen, top))
        for count in range(min(most, len(candidates)))
        for chosen in combinations(others, count)
    )


def written_is_read(server: BucketRules, built: Setup, lists: Lists) -> Export:
    """The export of `lists`, from which they were read again, and from each of its files alone; a second export is
    the same."""
    written = server.export(built, lists)
    assert server.read(written, built) == lists
    for name, text in written.files.items():
        assert server.read(Export(written.environment, (), {name: text}), built) == lists
    assert server.export(built, server.read(written, built)) == written
    return written
