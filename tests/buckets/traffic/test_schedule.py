"""The schedule is what a server does that serves one step after the other, only faster."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.limits import Limits
from llmc.buckets.traffic import schedule as scheduling
from llmc.buckets.traffic.events import DecodeRun, PromptGroup, TrafficRequest
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.schedule import schedule
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY
from tests.buckets.traffic.files import SAMPLE
from tests.buckets.traffic.simulator import simulate
from tests.tiers import full
from tests.timing import least_cpu_seconds


@dataclass(frozen=True)
class Steady:
    """Steps of constant time, in fractions that floats hold exactly."""

    prompt_seconds: float = 0.5
    decode_seconds: float = 0.375

    def prompt(self, lengths: Sequence[int], cached: Sequence[int]) -> float:
        return self.prompt_seconds

    def decode(self, batch: int, longest: int, total: int) -> float:
        return self.decode_seconds


class Varying:
    """Steps whose time depends on all there is, in fractions that floats hold exactly."""

    def prompt(self, lengths: Sequence[int], cached: Sequence[int]) -> float:
        return (1 + sum(lengths) - sum(cached)) / 16

    def decode(self, batch: int, longest: int, total: int) -> float:
        return (batch + longest + total) / 64


@st.composite
def traffic(draw: st.DrawFn) -> list[TrafficRequest]:
    requests = []
    arrival = 0.0
    for _ in range(draw(st.integers(0, 25))):
        arrival += draw(st.sampled_from([0, 0, 0.125, 0.5, 1, 3.25, 40]))
        prompt = draw(st.integers(1, 30))
        output = draw(st.integers(1, 4) | st.integers(1, 200))
        requests.append(TrafficRequest(arrival, prompt, output, draw(st.just(0) | st.integers(0, prompt - 1))))
    return requests


LIMITS = st.builds(lambda seqs, extra: Limits(256, seqs, seqs + extra), st.integers(1, 6), st.integers(0, 90))
TIMES = st.builds(Steady, st.sampled_from([0.125, 0.5, 2]), st.sampled_from([0.125, 0.25, 0.375]))
GROUPS = st.none() | st.integers(1, 4)


def requests_of(*rows: tuple[float, int, int]) -> list[TrafficRequest]:
    return [TrafficRequest(*row) for row in rows]


def test_an_example_by_hand():
    requests = requests_of((0, 10, 3), (0, 20, 2), (0, 5, 1), (9, 7, 4))
    assert list(schedule(requests, Limits(64, 2), step_time=Steady())) == [
        PromptGroup((10, 20), (0, 0)),
        DecodeRun(2, 20, 30, 1),
        PromptGroup((5,), (0,)),
        DecodeRun(1, 11, 11, 1),
        PromptGroup((7,), (0,)),
        DecodeRun(1, 7, 7, 3),
    ]


def test_an_arrival_ends_a_run_at_the_next_step_boundary():
    requests = requests_of((0, 10, 100), (0.5 + 3 * 0.375, 4, 1), (0.5 + 3 * 0.375 + 0.5 + 0.375 + 0.001, 4, 1))
    assert list(schedule(requests, Limits(256, 2), step_time=Steady())) == [
        PromptGroup((10,), (0,)),
        DecodeRun(1, 10, 10, 3),
        PromptGroup((4,), (0,)),
        DecodeRun(1, 13, 13, 2),
        PromptGroup((4,), (0,)),
        DecodeRun(1, 15, 15, 94),
    ]


def test_an_arrival_without_a_free_slot_ends_no_run():
    events = list(schedule(requests_of((0, 10, 100), (1, 4, 2)), Limits(256, 1), step_time=Steady()))
    assert events[1] == DecodeRun(1, 10, 10, 99)


def test_a_group_keeps_to_the_token_limit_except_for_a_prompt_that_alone_is_above_it():
    requests = [
        TrafficRequest(0, 90, 1),
        TrafficRequest(0, 30, 1, 20),
        TrafficRequest(0, 6, 1),
        TrafficRequest(0, 1, 1),
    ]
    events = list(schedule(requests, Limits(256, 8, 16), step_time=Steady()))
    assert [event.lengths for event in events] == [(90,), (30, 6), (1,)]
    assert events[1].cached == (20, 0)


def test_a_group_has_at_most_prompt_batch_prompts():
    requests = requests_of(*[(0, 5, 1)] * 5)
    events = schedule(requests, Limits(256, 8), step_time=Steady(), prompt_batch=2)
    assert [len(event.lengths) for event in events] == [2, 2, 1]


@PROPERTY
@given(traffic(), LIMITS, TIMES, GROUPS)
def test_it_equals_a_server_that_is_simulated_step_by_step(requests, limits, times, group):
    events = list(schedule(requests, limits, step_time=times, prompt_batch=group))
    assert events == simulate(requests, limits, times, group)
    assert events == list(schedule(iter(requests), limits, step_time=times, prompt_batch=group))


@full
@PROPERTY
@given(traffic(), LIMITS, GROUPS)
def test_it_equals_the_step_by_step_server_when_times_vary_and_are_requested_at_each_step(requests, limits, group):
    with mock.patch.object(scheduling, "PIECE", 1):
        events = list(schedule(requests, limits, step_time=Varying(), prompt_batch=group))
    assert events == simulate(requests, limits, Varying(), group)


def check_conservation(events: list[PromptGroup | DecodeRun], requests: list[TrafficRequest], limits: Limits) -> None:
    """Every prompt is in one group, every token in one step, and at no time are there more sequences than slots.

    Each sequence adds the tokens p, p + 1 … p + o − 2 to the totals of its steps, whatever the order.
    """
    groups = [event for event in events if isinstance(event, PromptGroup)]
    runs = [event for event in events if isinstance(event, DecodeRun)]
    prompts = [pair for group in groups for pair in zip(group.lengths, group.cached, strict=True)]
    assert prompts == [(request.prompt, request.cached) for request in requests]
    assert sum(run.batch * run.steps for run in runs) == sum(request.output - 1 for request in requests)
    held = sum(run.steps * run.total + run.batch * run.steps * (run.steps - 1) // 2 for run in runs)
    assert held == sum((r.output - 1) * r.prompt + (r.output - 1) * (r.output - 2) // 2 for r in requests)
    assert all(run.steps >= 1 and run.batch <= limits.max_num_seqs for run in runs)
    assert all(run.longest <= run.total <= run.batch * run.longest for run in runs)
    assert all(len(group.lengths) <= limits.max_num_seqs for group in groups)
    longest = max((request.prompt + request.output - 2 for request in requests if request.output > 1), default=0)
    assert max((run.longest + run.steps - 1 for run in runs), default=0) == longest


@full
@PROPERTY
@given(traffic(), LIMITS, GROUPS, st.none() | st.sampled_from([0.01, 1, 7.5, math.inf]))
def test_no_token_is_lost_at_any_rate(requests, limits, group, rate):
    arguments = {"step_time": AssumedStepTime(), "arrival_rate": rate, "prompt_batch": group}
    check_conservation(list(schedule(requests, limits, **arguments)), requests, limits)
    check_conservation(list(schedule(requests, limits, mean_rate=0.3, **arguments)), requests, limits)


@pytest.mark.parametrize("seqs", [1, 8, 64])
def test_no_token_of_a_real_trace_is_lost(seqs):
    requests = list(Trace(SAMPLE))
    limits = Limits(16384, seqs)
    check_conservation(list(schedule(requests, limits, step_time=AssumedStepTime())), requests, limits)


def test_a_rate_stretches_the_times_of_the_trace():
    requests = list(Trace(SAMPLE))[:300]
    mean_rate = Trace(SAMPLE).summary().rate
    assert mean_rate is not None
    limits = Limits(16384, 8)
    faster = [request._replace(time=request.time * (mean_rate / (4 * mean_rate))) for request in requests]
    events = list(schedule(faster, limits, step_time=AssumedStepTime()))
    rated = schedule(requests, limits, step_time=AssumedStepTime(), arrival_rate=4 * mean_rate, mean_rate=mean_rate)
    assert list(rated) == events
    assert events != list(schedule(requests, limits, step_time=AssumedStepTime()))


def test_requests_without_times_arrive_evenly_at_a_rate():
    requests = requests_of(*[(0, 5, 3)] * 6)
    even = [request._replace(time=index / 2) for index, request in enumerate(requests)]
    limits = Limits(64, 2)
    events = list(schedule(requests, limits, step_time=Steady(), arrival_rate=2))
    assert events == list(schedule(even, limits, step_time=Steady()))
    assert len(events) != len(list(schedule(requests, limits, step_time=Steady())))


def test_at_an_infinite_rate_all_have_arrived():
    requests = list(Trace(SAMPLE))[:200]
    together = [request._replace(time=0.0) for request in requests]
    limits = Limits(16384, 8)
    saturated = schedule(requests, limits, step_time=AssumedStepTime(), arrival_rate=math.inf, mean_rate=5.0)
    assert list(saturated) == list(schedule(together, limits, step_time=AssumedStepTime()))


def test_batches_are_fuller_the_faster_requests_arrive():
    requests = list(Trace(SAMPLE))
    means = []
    for rate in (0.2, 1, 5, 25, math.inf):
        runs: Counter[int] = Counter()
        for event in schedule(
            requests, Limits(16384, 32), step_time=AssumedStepTime(), arrival_rate=rate, mean_rate=4.7
        ):
            if isinstance(event, DecodeRun):
                runs[event.batch] += event.steps
        means.append(sum(batch * steps for batch, steps in runs.items()) / runs.total())
    assert means == sorted(means)
    assert means[0] < 2
    assert means[-1] > 30


def test_requests_are_read_only_as_far_as_steps_are_requested():
    endless = (TrafficRequest(location / 10, 5, 3) for location in itertools.count())
    events = schedule(endless, Limits(64, 4), step_time=Steady())
    assert len(list(itertools.islice(events, 1000))) == 1000
    assert next(endless).time < 1000


@pytest.mark.parametrize("arguments", [{}, {"arrival_rate": 5e-324}, {"arrival_rate": 5e-324, "mean_rate": 1e308}])
def test_arrivals_beyond_all_numbers_are_served_after_the_others(arguments):
    requests = requests_of((0, 5, 3), (1e308, 6, 3), (math.inf, 7, 3), (math.inf, 8, 3))
    events = list(schedule(requests, Limits(64, 1), step_time=Steady(), **arguments))
    assert [event.lengths for event in events[::2]] == [(5,), (6,), (7,), (8,)]
    assert events[1::2] == [DecodeRun(1, length, length, 2) for length in (5, 6, 7, 8)]


def test_times_beyond_all_numbers_have_arrived_at_an_infinite_rate():
    requests = requests_of((0, 5, 3), (1e308, 6, 3), (math.inf, 7, 3))
    events = list(schedule(requests, Limits(64), step_time=Steady(), arrival_rate=math.inf, mean_rate=1e308))
    assert events == [PromptGroup((5, 6, 7), (0, 0, 0)), DecodeRun(3, 7, 18, 2)]


def test_no_requests_take_no_steps():
    assert list(schedule([], Limits(64), step_time=Steady())) == []


@pytest.mark.parametrize("rate", [0, -1.5, math.nan])
def test_a_rate_that_makes_no_sense_is_refused_at_once(rate):
    with pytest.raises(InputError, match=f"arrival_rate {rate} must be above 0 requests per second"):
        schedule([], Limits(64), step_time=Steady(), arrival_rate=rate)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_step_that_takes_no_time_or_all_of_it_is_refused(seconds):
    requests = requests_of((0, 5, 9), (100, 5, 9))
    for times in (Steady(prompt_seconds=seconds), Steady(decode_seconds=seconds)):
        with pytest.raises(InputError, match=f"a step time of {seconds} seconds"):
            list(schedule(requests, Limits(64), step_time=times))


def test_twenty_thousand_requests_are_scheduled_at_once():
    requests = [
        request._replace(time=request.time + 330 * repeat) for repeat in range(14) for request in Trace(SAMPLE)
    ][:20_000]

    def scheduled():
        return list(schedule(requests, Limits(16384, 32), step_time=AssumedStepTime()))

    assert least_cpu_seconds(scheduled, 2) < 3
    assert len(scheduled()) > 20_000
