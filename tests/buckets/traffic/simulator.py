"""Continuous batching, one step at a time and one sequence at a time: what `schedule` must agree with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.events import DecodeRun, PromptGroup, TrafficRequest
from llmc.buckets.traffic.step_time import StepTime


@dataclass
class Running:
    """A sequence with `held` tokens in the cache and `left` decode steps to take."""

    held: int
    left: int


def simulate(
    requests: Iterable[TrafficRequest], limits: Limits, step_time: StepTime, prompt_batch: int | None = None
) -> list[PromptGroup | DecodeRun]:
    waiting = list(requests)
    running: list[Running] = []
    events: list[PromptGroup | DecodeRun] = []
    clock = 0.0
    fresh = True
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0].time)
        group: list[TrafficRequest] = []
        while waiting and waiting[0].time <= clock and len(running) + len(group) < limits.max_num_seqs:
            new = sum(request.prompt - request.cached for request in [*group, waiting[0]])
            if group and (len(group) == prompt_batch or new > limits.max_num_batched_tokens):
                break
            group.append(waiting.pop(0))
        if group:
            event = PromptGroup(tuple(r.prompt for r in group), tuple(r.cached for r in group))
            events.append(event)
            clock += step_time.prompt(event.lengths, event.cached)
            running += [Running(request.prompt, request.output - 1) for request in group if request.output > 1]
            fresh = True
            continue
        held = [sequence.held for sequence in running]
        step = DecodeRun(len(held), max(held), sum(held), 1)
        if fresh:
            events.append(step)
        else:
            events[-1] = events[-1]._replace(steps=events[-1].steps + 1)
        clock += step_time.decode(*step[:3])
        for sequence in running:
            sequence.held += 1
            sequence.left -= 1
        fresh = any(not sequence.left for sequence in running)
        running = [sequence for sequence in running if sequence.left]
    return events
