"""Request-by-request simulation of one device, and of a pipeline of two.

A single device computes prompts one by one as they arrive and slots are free, before any further decode step. In the
pipeline, the prefill side computes prompts in arrival order while at most `bound` wait for transfer
(runtime/disaggregated/worker.py); the decode side takes arrived prompts between two steps. A decode step's time is
that of its longest sequence, rounded like its cost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from llmc.buckets.disaggregated.device import Link, Sharing, Stage
from llmc.buckets.traffic.events import TrafficRequest
from llmc.errors import InputError

BOUND = 2
"""Computed prompts that may wait for a slot; a prefill worker with one prompt per step keeps as many."""

PIECE = 16
"""Decode steps simulated at once while nothing can change in between."""


@dataclass(frozen=True)
class SimulatedRun:
    """Results of `requests` requests: `seconds` from the first arrival to the last token, and busy seconds by activity.

    `first_token_s` is each request's seconds to the first token, ascending. Prefill, decode and transfer each have
    their busy time.
    """

    requests: int
    tokens: int
    seconds: float
    first_token_s: tuple[float, ...]
    prefill_s: float
    decode_s: float
    moving_s: float = 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests per second of the whole run."""
        return self.requests / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second."""
        return self.tokens / self.seconds

    def first_token(self, quantile: float) -> float:
        """Return the seconds to the first token at `quantile` (0.5, 0.95) of the requests."""
        return self.first_token_s[math.ceil(quantile * len(self.first_token_s)) - 1]


@dataclass
class _Decoding:
    """Sequences in slots: at decode step `step`, one with base b has b + step tokens, and ends at its own step."""

    stage: Stage
    step: int = 0
    _ends: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, request: TrafficRequest) -> None:
        if request.output > 1:
            heappush(self._ends, (self.step + request.output - 1, request.prompt - self.step))

    def piece(self, most: int) -> tuple[int, float]:
        """Steps to run next, at most `most` and until one sequence ends, and their seconds."""
        steps = min(most, self._ends[0][0] - self.step)
        bases = [base for _, base in self._ends]
        longest = max(bases) + self.step
        total = sum(bases) + self.step * len(bases)
        return steps, steps * self.stage.decode_s(len(bases), longest, total)

    def run(self, steps: int) -> None:
        self.step += steps
        while self._ends and self._ends[0][0] <= self.step:
            heappop(self._ends)


def alone(requests: Sequence[TrafficRequest], stage: Stage, slots: int) -> SimulatedRun:
    """Simulate one device that serves all requests. Raises InputError without requests."""
    waiting, decoding = _waiting(requests), _Decoding(stage)
    clock = prefill = busy = 0.0
    first: list[float] = []
    while waiting or decoding:
        if waiting and not decoding:
            clock = max(clock, waiting[0].time)
        while waiting and len(decoding) < slots and waiting[0].time <= clock:
            request = waiting.popleft()
            seconds = stage.prompt_s(request.prompt)
            clock, prefill = clock + seconds, prefill + seconds
            first.append(clock - request.time)
            decoding.add(request)
        if decoding:
            steps, seconds = decoding.piece(1 if waiting and len(decoding) < slots else PIECE)
            decoding.run(steps)
            clock, busy = clock + seconds, busy + seconds
    return _outcome(requests, clock, first, prefill, busy, 0.0)


def pipeline(
    requests: Sequence[TrafficRequest], prefill: Stage, decode: Stage, link: Link, slots: int, sharing: Sharing,
    bound: int = BOUND,
) -> SimulatedRun:  # fmt: skip
    """Simulate prefill on one device and decode on the other. Raises InputError without requests."""
    return _Pipeline(requests, prefill, decode, link, slots, sharing, bound).run()


class _Pipeline:
    def __init__(
        self, requests: Sequence[TrafficRequest], prefill: Stage, decode: Stage, link: Link, slots: int,
        sharing: Sharing, bound: int,
    ) -> None:  # fmt: skip
        self._requests, self._waiting = requests, _waiting(requests)
        self._prefill, self._link, self._slots, self._sharing, self._bound = prefill, link, slots, sharing, bound
        self._decoding = _Decoding(decode)
        self._clock = self._prefill_s = self._decode_s = self._moving_s = 0.0
        self._computing: TrafficRequest | None = None
        self._computing_left = 0.0
        self._ready: deque[tuple[float, TrafficRequest]] = deque()
        self._taking: list[TrafficRequest] = []
        self._steps = 0
        self._decode_left = 0.0
        self._first: list[float] = []

    def run(self) -> SimulatedRun:
        while True:
            self._start_prompt()
            self._start_decode()
            if not self._advance():
                break
        return _outcome(self._requests, self._clock, self._first, self._prefill_s, self._decode_s, self._moving_s)

    @property
    def _decode_busy(self) -> bool:
        return bool(self._taking or self._steps)

    def _start_prompt(self) -> None:
        if self._computing is not None or not self._waiting or len(self._ready) >= self._bound:
            return
        if self._waiting[0].time <= self._clock:
            self._computing = self._waiting.popleft()
            moving = self._link.moving_s(self._computing.prompt) / 2
            seconds = self._prefill.prompt_s(self._computing.prompt)
            self._computing_left = seconds + moving
            self._prefill_s, self._moving_s = self._prefill_s + seconds, self._moving_s + moving

    def _start_decode(self) -> None:
        if self._decode_busy:
            return
        while (
            self._ready and self._ready[0][0] <= self._clock and len(self._decoding) + len(self._taking) < self._slots
        ):
            self._taking.append(self._ready.popleft()[1])
        if self._taking:
            self._decode_left = sum(self._link.moving_s(request.prompt) / 2 for request in self._taking)
            self._moving_s += self._decode_left
        elif self._decoding:
            coming = self._computing is not None or self._ready or self._waiting
            self._steps, self._decode_left = self._decoding.piece(1 if coming else PIECE)
            self._decode_s += self._decode_left

    def _advance(self) -> bool:
        """Move to the next time at which an activity ends or can begin; false when nothing is left."""
        both = self._computing is not None and self._decode_busy
        speed = self._sharing.speed if both else 1.0
        moments = []
        if self._computing is not None:
            moments.append(self._clock + self._computing_left / speed)
        elif self._waiting and len(self._ready) < self._bound:
            moments.append(max(self._waiting[0].time, self._clock))
        if self._decode_busy:
            moments.append(self._clock + self._decode_left / speed)
        elif self._ready:
            moments.append(max(self._ready[0][0], self._clock))
        if not moments:
            return False
        now = min(moments)
        done = (now - self._clock) * speed
        self._clock = now
        self._end_prompt(done)
        self._end_decode(done)
        return True

    def _end_prompt(self, done: float) -> None:
        if self._computing is None:
            return
        self._computing_left -= done
        if self._computing_left <= _ROUNDING:
            self._ready.append((self._clock + self._link.latency_s, self._computing))
            self._computing = None

    def _end_decode(self, done: float) -> None:
        if not self._decode_busy:
            return
        self._decode_left -= done
        if self._decode_left > _ROUNDING:
            return
        for request in self._taking:
            self._first.append(self._clock - request.time)
            self._decoding.add(request)
        self._taking.clear()
        if self._steps:
            self._decoding.run(self._steps)
            self._steps = 0


_ROUNDING = 1e-12


def _waiting(requests: Sequence[TrafficRequest]) -> deque[TrafficRequest]:
    if not requests:
        raise InputError("the traffic has no request that the limits admit")
    return deque(requests)


def _outcome(
    requests: Sequence[TrafficRequest], clock: float, first: list[float], prefill: float, decode: float, moving: float
) -> SimulatedRun:  # fmt: skip
    tokens = sum(request.output for request in requests)
    return SimulatedRun(
        len(requests), tokens, clock - requests[0].time, tuple(sorted(first)), prefill, decode, moving
    )  # fmt: skip
