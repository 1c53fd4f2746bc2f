"""Simulation of continuous batching with chunked prefill: prompts and decodes share steps of a token budget.

The rule is that of vLLM's V1 scheduler (vllm/v1/core/sched/scheduler.py, 0.11 to 0.22). In every step the running
sequences come first, in arrival order, each with its remaining tokens, up to the rest of the budget
max_num_batched_tokens. Then waiting requests are admitted while a slot of max_num_seqs and budget remain, the last of
them with the part of its prompt that fits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.schedule import PIECE, positive
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError

Ints = NDArray[np.int64]


class Chunk(NamedTuple):
    """A part of a prompt: a step computes `new` tokens after `past` cached tokens; `last` marks the prompt's end.

    `request` counts from 0 in arrival order.
    """

    new: int
    past: int
    last: bool
    request: int


class MixedSteps(NamedTuple):
    """`steps` consecutive steps of the same sequences; more than one only without prompts.

    `chunks` are parts of prompts. `cached` int64 [batch] is the cached tokens of each decoding sequence at the first
    step, in the order in which they began to decode; at step t (from 0) they are cached + t. `requests` [batch] are the
    requests of these sequences. `finished` are those that ended before the first step and after the previously yielded
    steps, which lets a reader track a server's cache.
    """

    chunks: tuple[Chunk, ...]
    cached: Ints
    steps: int
    requests: Ints
    finished: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """New tokens of one step, one for each decoding sequence."""
        return len(self.cached) + sum(chunk.new for chunk in self.chunks)


@dataclass
class _Prompt:
    request: int
    length: int
    computed: int
    output: int


def chunked_steps(
    requests: Iterable[TrafficRequest],
    limits: Limits,
    step_time: StepTime,
    *,
    chunk_most: int | None = None,
    whole: bool = False,
) -> Iterator[MixedSteps]:
    """Yield the steps that a server takes for `requests`, which are within `limits` and in arrival order.

    A request of p prompt and o output tokens is in prompt chunks until all p are cached, which yields its first token,
    and then in o − 1 decode steps. `chunk_most` bounds the tokens of one chunk (vLLM's --long-prefill-token-threshold).
    With `whole` prompts are never split, as without chunked prefill: one that does not fit waits for the next step. An
    idle server skips to the next arrival; requests without times (all 0) saturate the server.

    Raises InputError for a step time that is not above 0 and finite, and for a whole prompt that has more new tokens
    than max_num_batched_tokens less a decode step. Takes O(max_num_seqs) per request, whatever its length.
    """
    arrivals = iter(requests)
    following = next(arrivals, None)
    clock, step = 0.0, 0
    prompts: deque[_Prompt] = deque()
    finishing: list[tuple[int, int]] = []
    bases: dict[int, int] = {}
    number = 0
    finished: list[int] = []
    while bases or prompts or following is not None:
        if not bases and not prompts and following is not None:
            clock = max(clock, following.time)
        room = limits.max_num_batched_tokens - len(bases)
        chunks: list[Chunk] = []
        ready: list[_Prompt] = []
        blocked = False
        for prompt in prompts:
            if room > 0:
                room -= _advance(prompt, min(room, chunk_most or room), chunks, ready)
        while (
            following is not None
            and following.time <= clock
            and room > 0
            and len(bases) + len(prompts) < limits.max_num_seqs
        ):
            if whole and following.prompt - following.cached > room:
                blocked = True
                break
            prompt = _Prompt(number, following.prompt, following.cached, following.output)
            number += 1
            prompts.append(prompt)
            room -= _advance(prompt, min(room, chunk_most or room), chunks, ready)
            following = next(arrivals, None)
        if blocked and following is not None and not bases and not chunks:
            raise InputError(
                f"a prompt of {following.prompt} tokens does not fit max_num_batched_tokens "
                f"{limits.max_num_batched_tokens} at once; raise it, or switch chunked prefill on"
            )
        cached, running = _running(bases, step)
        ended, finished = tuple(finished), []
        if chunks:
            yield MixedSteps(tuple(chunks), cached, 1, running, ended)
            clock += positive(step_time.prompt([c.new + c.past for c in chunks], [c.past for c in chunks]))
            if len(cached):
                clock += positive(step_time.decode(len(cached), int(cached.max()), int(cached.sum())))
            step += 1
            for prompt in ready:
                prompts.remove(prompt)
                bases[prompt.request] = prompt.length - step
                heappush(finishing, (step + prompt.output - 1, prompt.request))
        elif bases:
            free = following is not None and not blocked and len(bases) < limits.max_num_seqs
            until = following.time if free and following is not None else math.inf
            taken, clock = _decode(cached, finishing[0][0] - step, clock, until, step_time)
            step += taken
            yield MixedSteps((), cached, taken, running, ended)
        while finishing and finishing[0][0] <= step:
            finished.append(heappop(finishing)[1])
            del bases[finished[-1]]


def _running(bases: dict[int, int], step: int) -> tuple[Ints, Ints]:
    """The cached tokens of each decoding sequence at `step`, and its request."""
    size = len(bases)
    return np.fromiter(bases.values(), np.int64, size) + step, np.fromiter(bases, np.int64, size)


def _decode(cached: Ints, most: int, clock: float, until: float, step_time: StepTime) -> tuple[int, float]:
    """Decode steps of the same sequences from `clock` on: at most `most`, and none that starts at or after `until`.

    Returns their number, and the end of the last one.
    """
    batch, longest, total = len(cached), int(cached.max()), int(cached.sum())
    done = 0
    while done < most and clock < until:
        seconds = positive(step_time.decode(batch, longest + done, total + batch * done))
        taken = min(PIECE, most - done)
        if clock + taken * seconds >= until:
            taken = min(taken, max(1, math.ceil((until - clock) / seconds)))
        clock += taken * seconds
        done += taken
    return done, clock


def _advance(prompt: _Prompt, most: int, chunks: list[Chunk], ready: list[_Prompt]) -> int:
    """Give `prompt` at most `most` tokens of the step; returns how many it takes."""
    new = min(prompt.length - prompt.computed, most)
    last = prompt.computed + new == prompt.length
    chunks.append(Chunk(new, prompt.computed, last, prompt.request))
    prompt.computed += new
    if last:
        ready.append(prompt)
    return new
