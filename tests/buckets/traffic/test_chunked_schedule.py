"""Steps that prompts and decodes share are what a server does that looks at one step and one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.limits import Limits
from llmc.buckets.traffic import chunked_schedule
from llmc.buckets.traffic.chunked_schedule import chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY


class Varying:
    """Steps whose time depends on all there is, in fractions that floats hold exactly."""

    def prompt(self, lengths: Sequence[int], cached: Sequence[int]) -> float:
        return (1 + sum(lengths) - sum(cached)) / 16

    def decode(self, batch: int, longest: int, total: int) -> float:
        return (batch + longest + total) / 64


@st.composite
def traffic(draw: st.DrawFn) -> list[TrafficRequest]:
    requests, arrival = [], 0.0
    for _ in range(draw(st.integers(0, 10))):
        arrival += draw(st.sampled_from([0, 0, 0.125, 1, 40]))
        prompt = draw(st.integers(1, 16))
        requests.append(TrafficRequest(arrival, prompt, draw(st.integers(1, 20)), draw(st.integers(0, prompt - 1))))
    return requests


@dataclass
class Sequenced:
    prompt: int
    held: int
    left: int


Step = tuple[tuple[tuple[int, int, bool], ...], tuple[int, ...]]


def simulate(requests: list[TrafficRequest], limits: Limits, whole: bool) -> list[Step]:
    """Chunks and cached tokens of every step."""
    waiting, running, steps, clock, times = list(requests), list[Sequenced](), list[Step](), 0.0, Varying()
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0].time)
        decoding = [each for each in running if each.held >= each.prompt]
        room = limits.max_num_batched_tokens - len(decoding)
        cached = tuple(each.held for each in decoding)
        chunks = []
        for each in [each for each in running if each.held < each.prompt]:
            new = min(room, each.prompt - each.held)
            if new:
                chunks.append((each, new))
                room -= new
        while waiting and waiting[0].time <= clock and room and len(running) < limits.max_num_seqs:
            if whole and waiting[0].prompt - waiting[0].cached > room:
                break
            request = waiting.pop(0)
            running.append(Sequenced(request.prompt, request.cached, request.output))
            new = min(room, request.prompt - request.cached)
            chunks.append((running[-1], new))
            room -= new
        parts = tuple((new, each.held, each.held + new == each.prompt) for each, new in chunks)
        steps.append((parts, cached))
        if parts:
            clock += times.prompt([new + past for new, past, _ in parts], [past for _, past, _ in parts])
        if cached:
            clock += times.decode(len(cached), max(cached), sum(cached))
        for each in decoding:
            each.held, each.left = each.held + 1, each.left - 1
        for each, new in chunks:
            each.held += new
            each.left -= each.held == each.prompt
        running = [each for each in running if each.left > 0]
    return steps


@PROPERTY
@given(traffic(), st.integers(1, 5), st.integers(16, 24), st.booleans())
def test_it_is_what_a_server_does_step_by_step(
    requests: list[TrafficRequest], seqs: int, tokens: int, whole: bool
) -> None:
    limits = Limits(64, seqs, tokens)
    found: list[Step] = []
    with mock.patch.object(chunked_schedule, "PIECE", 1):  # every step's own time
        for steps in chunked_schedule.chunked_steps(requests, limits, Varying(), whole=whole):
            parts = tuple((chunk.new, chunk.past, chunk.last) for chunk in steps.chunks)
            assert steps.steps == 1 or not parts
            found += [(parts, tuple((steps.cached + step).tolist())) for step in range(steps.steps)]
    expected = simulate(requests, limits, whole)
    assert [(parts, sorted(cached)) for parts, cached in found] == [
        (parts, sorted(cached)) for parts, cached in expected
    ]


@given(traffic(), st.integers(1, 4))
def test_a_chunk_is_no_longer_than_its_bound(requests: list[TrafficRequest], most: int) -> None:
    steps = list(chunked_steps(requests, Limits(64, 4, 16), AssumedStepTime(), chunk_most=most))
    assert all(chunk.new <= most for step in steps for chunk in step.chunks)
    new = sum(chunk.new for step in steps for chunk in step.chunks)
    assert new == sum(request.prompt - request.cached for request in requests)


def test_a_whole_prompt_that_never_fits_is_an_error() -> None:
    requests = [TrafficRequest(0, 17, 2)]
    with pytest.raises(InputError, match=r"17 tokens does not fit max_num_batched_tokens 16 at once; raise it, or"):
        list(chunked_steps(requests, Limits(64, 4, 16), AssumedStepTime(), whole=True))
    assert [step.tokens for step in chunked_steps(requests, Limits(64, 4, 16), AssumedStepTime())] == [16, 1, 1]
