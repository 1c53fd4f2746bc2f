"""Simulation of continuous batching: the prompts that a server admits together, and the sizes of its decode batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.events import DecodeRun, PromptGroup, TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError

PIECE = 64
"""Decode steps of one batch that share the first one's time, so that fewer times are computed."""


def schedule(
    requests: Iterable[TrafficRequest],
    limits: Limits,
    *,
    step_time: StepTime,
    arrival_rate: float | None = None,
    mean_rate: float | None = None,
    prompt_batch: int | None = None,
) -> Iterator[PromptGroup | DecodeRun]:
    """Yield the steps that a server takes for `requests`, in order; requests are read lazily.

    First come, first served, in max_num_seqs slots. Whenever a slot is free and a request has arrived, the waiting ones
    are admitted together as one PromptGroup, before any further decode step (prefill has priority, as in vLLM on
    Gaudi). A group has at most as many prompts as free slots, at most `prompt_batch`, and at most
    max_num_batched_tokens new tokens (prompt less cached); its first is admitted in any case, since a long prompt runs
    in chunks. Otherwise all running sequences take one decode step together. Prefill yields the first token of an
    output, so a request of p prompt and o output tokens takes o − 1 decode steps, with p, p + 1, … tokens in the cache.
    An idle server skips to the next arrival.

    Consecutive decode steps of the same sequences are one DecodeRun; it ends when the first of them finishes, or at the
    first step boundary at which an arrival can be admitted.

    `requests` must be within the limits, as those from `Admission` are, and arrive in order. `arrival_rate`, in
    requests per second, moves them:

    - None: they arrive at their own times; without times (all 0) the server is saturated from the start.
    - finite, with `mean_rate`, the trace's own mean rate (`TraceSummary.rate`): times are stretched to that rate,
      and bursts stay bursts.
    - finite, with mean_rate None (no times): they arrive evenly spaced.
    - infinite: all have arrived at time 0.

    Raises InputError when called, for an arrival_rate that is not above 0; and while iterated, for a step time that is
    not above 0 and finite. Takes about O(log max_num_seqs) per request.
    """
    if arrival_rate is not None and not arrival_rate > 0:
        raise InputError(f"arrival_rate {arrival_rate} must be above 0 requests per second")
    group = limits.max_num_seqs if prompt_batch is None else prompt_batch
    return _steps(arrivals(requests, arrival_rate, mean_rate), limits, step_time, group)


def arrivals(
    requests: Iterable[TrafficRequest], arrival_rate: float | None, mean_rate: float | None
) -> Iterator[tuple[float, TrafficRequest]]:
    """Yield `requests` with their arrival times (`schedule` explains the rates)."""
    if arrival_rate is None:
        return ((request.time, request) for request in requests)
    if mean_rate is None or arrival_rate == math.inf:
        return ((index / arrival_rate, request) for index, request in enumerate(requests))
    return ((request.time * mean_rate / arrival_rate, request) for request in requests)


def _steps(
    arrivals: Iterator[tuple[float, TrafficRequest]], limits: Limits, step_time: StepTime, prompt_batch: int
) -> Iterator[PromptGroup | DecodeRun]:
    """The simulation. All sequences grow by one token each decode step, so they are not updated step by step: one with
    p tokens at decode step d has, at any step s, its base p − d plus s tokens, and ends at a step known at the start.
    """
    clock = 0.0
    step = 0
    batch = 0
    bases = 0
    finishing: list[tuple[int, int]] = []
    longest: list[tuple[int, int]] = []
    following = next(arrivals, None)
    while batch or following is not None:
        if not batch and following is not None:
            clock = max(clock, following[0])
        if following is not None and following[0] <= clock and batch < limits.max_num_seqs:
            lengths: list[int] = []
            cached: list[int] = []
            room = limits.max_num_batched_tokens
            most = min(limits.max_num_seqs - batch, prompt_batch)
            while following is not None and following[0] <= clock and len(lengths) < most:
                _, prompt, output, held = following[1]
                room -= prompt - held
                if lengths and room < 0:
                    break
                lengths.append(prompt)
                cached.append(held)
                if output > 1:
                    batch += 1
                    bases += prompt - step
                    heappush(finishing, (step + output - 1, prompt - step))
                    heappush(longest, (step - prompt, step + output - 1))
                following = next(arrivals, None)
            group = PromptGroup(tuple(lengths), tuple(cached))
            clock += positive(step_time.prompt(group.lengths, group.cached))
            yield group
            continue
        while longest[0][1] <= step:
            heappop(longest)
        start, end, top = step, finishing[0][0], step - longest[0][0]
        until = None if following is None or batch == limits.max_num_seqs else following[0]
        if following is None:
            step = end
        while step < end and (until is None or clock < until):
            seconds = positive(step_time.decode(batch, top + step - start, bases + batch * step))
            taken = min(PIECE, end - step)
            if until is not None and clock + taken * seconds >= until:
                taken = min(taken, max(1, math.ceil((until - clock) / seconds)))
            clock += taken * seconds
            step += taken
        yield DecodeRun(batch, top, bases + batch * start, step - start)
        while finishing and finishing[0][0] == step:
            bases -= heappop(finishing)[1]
            batch -= 1


def positive(seconds: float) -> float:
    """Return `seconds` of a step. Raises InputError where they are not above 0 and finite."""
    if not 0 < seconds < math.inf:
        raise InputError(f"a step time of {seconds} seconds; every step must take more than 0, and end")
    return seconds
