"""Traffic that is shifted, and mixtures of it with the traffic itself."""

from __future__ import annotations

import pytest

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.admission import Admission
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.integrations.base import GraphDemand, Setup, spaced
from llmc.integrations.shifts import SHIFTS, UNIFORM, mixture, shifted
from tests.integrations.fake import Fake
from tests.integrations.judging import counted

LIMITS = Limits(100, 8, 64, 8)


@pytest.mark.parametrize(
    ("shift", "before", "after"),
    [
        ("lengths × 2", TrafficRequest(3.0, 20, 10, 4), TrafficRequest(3.0, 40, 20, 8)),
        ("lengths × 2", TrafficRequest(3.0, 70, 40, 60), TrafficRequest(3.0, 99, 1, 98)),
        ("lengths × 2", TrafficRequest(3.0, 30, 30), TrafficRequest(3.0, 60, 40)),
        ("lengths × 0.5", TrafficRequest(3.0, 20, 10, 4), TrafficRequest(3.0, 10, 5, 2)),
        ("lengths × 0.5", TrafficRequest(3.0, 4, 1, 3), TrafficRequest(3.0, 2, 1, 1)),
        ("lengths × 0.5", TrafficRequest(3.0, 1, 1), TrafficRequest(3.0, 1, 1)),
        ("arrivals × 2", TrafficRequest(3.0, 20, 10, 4), TrafficRequest(1.5, 20, 10, 4)),
    ],
)
def test_each_request_is_changed_within_the_limits(shift: str, before: TrafficRequest, after: TrafficRequest) -> None:
    assert list(Admission(LIMITS, clip=True)([SHIFTS[shift](before)])) == [after]


def test_a_server_takes_other_steps_for_each_shift(fake: Fake, setup: Setup) -> None:
    requests = [TrafficRequest(float(index), 12, 6) for index in range(8)]
    found = shifted(fake, setup, requests, AssumedStepTime())
    assert list(found) == [*SHIFTS, UNIFORM]
    assert [max(found[name]["tokens"]) for name in ("lengths × 0.5", "lengths × 2")] == [(6,), (24,)]
    assert found[UNIFORM]["tokens"] == counted("tokens", dict.fromkeys(range(64, 0, -1), 1))


def test_requests_without_times_have_no_rate_to_double_and_steps_no_lengths(fake: Fake, setup: Setup) -> None:
    assert "arrivals × 2" not in shifted(fake, setup, [TrafficRequest(0.0, 12, 6)], AssumedStepTime())
    assert list(shifted(fake, setup, [], AssumedStepTime())) == [UNIFORM]


def test_weights_are_of_padding_overhead_whatever_the_number_of_steps() -> None:
    traffic, other = {"tokens": counted("tokens", {4: 10, 8: 5})}, {"tokens": counted("tokens", {4: 1, 100: 1})}
    found = mixture(traffic, {"other": other}, {"tokens": {"other": 0.25}})["tokens"]
    real = {name: demand.real / found[8,].real for (name,), demand in found.items()}
    assert real == pytest.approx({4: 1 + 2 * 0.25 * 4 / 104, 8: 1, 100: 2 * 0.25 * 100 / 104})
    assert mixture(traffic, {"other": other}, {"tokens": {}})["tokens"].keys() == {(4,), (8,)}
    assert mixture({}, {"other": other}, {"tokens": {"other": 0.0}}) == {}
    uncounted = {"requests": counted("requests", {3: 2})}
    assert mixture({**traffic, **uncounted}, {"other": other}, {"tokens": {}})["requests"].keys() == {(3,)}
    assert isinstance(found[4,], GraphDemand)


@pytest.mark.parametrize(("top", "most", "sizes"), [(3, 8, [3, 2, 1]), (10, 4, [10, 7, 4, 1]), (0, 4, [])])
def test_sizes_are_evenly_spaced_from_the_largest(top: int, most: int, sizes: list[int]) -> None:
    assert list(spaced(top, most)) == sizes
