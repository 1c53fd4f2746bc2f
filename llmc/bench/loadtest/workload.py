"""The requests of a run: tokens in and out, and times."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.admission import Admission
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace
from llmc.errors import InputError

Arrivals = Literal["poisson", "uniform"]
Lengths = tuple[int, int]
"""Tokens from the first to the second, each as likely."""


class Ask(NamedTuple):
    """One request to be: `due_s` is None in closed loop."""

    due_s: float | None
    prompt: int
    output: int


@dataclass(frozen=True)
class Workload:
    """Which requests a run sends.

    `traffic` is a trace of lengths, its first `requests` that fit; without one, lengths are drawn from `prompt_len`
    and `output_len`. Lengths of a trace are multiplied by `scale`, to whole tokens and at least 1; with
    `max_model_len` what is longer is then cut to it as planning does (`Admission`). `rate` in requests a second, or
    "trace" for the trace's own times, `speedup` times as fast, sends in open loop; None is closed loop, with
    `concurrency` clients. Equal workloads ask for equal requests.
    """

    requests: int = 100
    traffic: Path | None = None
    scale: float = 1.0
    max_model_len: int | None = None
    prompt_len: Lengths = (128, 128)
    output_len: Lengths = (64, 64)
    rate: float | Literal["trace"] | None = None
    speedup: float = 1.0
    arrivals: Arrivals = "poisson"
    burstiness: float = 1.0
    concurrency: int = 8
    seed: int = 0

    def asks(self) -> list[Ask]:
        """The requests, in the order in which they are due.

        Raises InputError for a trace that cannot be read, has too few requests, or no times where they are asked for.
        """
        found = self._from_trace(self.traffic) if self.traffic is not None else list(self._drawn())
        if self.rate is None:
            return [Ask(None, request.prompt, request.output) for request in found]
        if self.rate == "trace":
            times = [request.time / self.speedup for request in found]
        else:
            times = send_times(len(found), self.rate, self.arrivals, self.burstiness, self.seed)
        begin = times[0]
        return [Ask(time - begin, r.prompt, r.output) for time, r in zip(times, found, strict=True)]

    def describe(self) -> str:
        """How requests are sent, in words."""
        if self.rate is None:
            return f"closed loop, {self.concurrency} at a time"
        if self.rate == "trace":
            return "open loop, at the trace's times" + (f", {self.speedup:g}× as fast" if self.speedup != 1 else "")
        if self.rate == float("inf"):
            return "open loop, all at once"
        bursts = f", burstiness {self.burstiness:g}" if self.burstiness != 1 else ""
        return f"open loop, {self.rate:.4g} requests/s ({self.arrivals}{bursts})"

    def _from_trace(self, path: Path) -> list[TrafficRequest]:
        trace = Trace(path)
        if self.rate == "trace" and not trace.has_times:
            raise InputError(f"{path} has no times; give --rate in requests per second, or --concurrency")
        scaled = self._scaled(trace)
        fitting = scaled
        if self.max_model_len is not None:
            fitting = Admission(Limits(self.max_model_len, 1), clip=True)(scaled)
        found = list(islice(fitting, self.requests))
        if len(found) < self.requests:
            raise InputError(f"{path} has {len(found)} requests; ask for --requests {len(found)} or fewer")
        return found

    def _scaled(self, requests: Iterable[TrafficRequest]) -> Iterator[TrafficRequest]:
        for time, prompt, output, _ in requests:
            yield TrafficRequest(time, max(1, round(prompt * self.scale)), max(1, round(output * self.scale)))

    def _drawn(self) -> Iterator[TrafficRequest]:
        draw = random.Random(f"lengths {self.seed}")  # noqa: S311 - a workload, not a secret
        for _ in range(self.requests):
            yield TrafficRequest(0.0, draw.randint(*self.prompt_len), draw.randint(*self.output_len))


def send_times(
    count: int, rate: float, arrivals: Arrivals = "poisson", burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds from the run's start at which `count` requests are due, the first at 0, `rate` a second in the mean.

    uniform: evenly. poisson: gaps from a gamma distribution of shape `burstiness` and mean 1 / rate; at 1 these are
    exponential, a Poisson process, below 1 burstier and above 1 more even. An infinite rate: all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    if arrivals == "uniform":
        return [i / rate for i in range(count)]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]
