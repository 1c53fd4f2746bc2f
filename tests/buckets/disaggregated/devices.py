"""Devices of straight lines, and requests, for the model of disaggregated prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from llmc.buckets.disaggregated.device import Link, Stage
from llmc.buckets.traffic.events import TrafficRequest


@dataclass(frozen=True)
class Line:
    """Steps of `fixed` seconds, and more for each new token and each row."""

    fixed: float
    token: float
    row: float

    def prompt(self, lengths: Sequence[int], cached: Sequence[int]) -> float:
        return self.fixed + self.token * (sum(lengths) - sum(cached))

    def decode(self, batch: int, longest: int, total: int) -> float:
        return self.fixed + self.row * batch


def stage(name: str = "x", fixed: float = 0.01, token: float = 0.001, row: float = 0.001) -> Stage:
    return Stage(name, Line(fixed, token, row))


def requests(count: int, prompt: int, output: int, every: float = 0.0) -> list[TrafficRequest]:
    return [TrafficRequest(at * every, prompt, output) for at in range(count)]


seconds = st.floats(1e-4, 0.1)
stages = st.builds(stage, st.sampled_from(["x", "y"]), seconds, st.floats(1e-6, 1e-2), st.floats(0, 1e-2))
links = st.builds(Link, st.integers(1, 10**6), st.floats(0.01, 100), st.floats(0, 0.1))
traffic = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 200), st.integers(1, 20)), min_size=1, max_size=20
).map(lambda gaps: [
    TrafficRequest(sum(gap for gap, *_ in gaps[:at]), prompt, output) for at, (_, prompt, output) in enumerate(gaps)
])  # fmt: skip
