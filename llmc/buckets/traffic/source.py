"""Recorded traffic for planning and evaluation: a trace, replayed under a server's limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from llmc.buckets.cost.bench import Bench
from llmc.buckets.cost.objective import Objective, Seconds, Tokens
from llmc.buckets.limits import Limits
from llmc.buckets.traffic.admission import Admission
from llmc.buckets.traffic.events import DecodeRun, PromptGroup, TrafficRequest
from llmc.buckets.traffic.formats.base import Fields
from llmc.buckets.traffic.length_histogram import End
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.schedule import arrivals, schedule
from llmc.buckets.traffic.step_time import AssumedStepTime, BenchStepTime, StepTime
from llmc.buckets.traffic.timestamps import Period


class Traffic:
    """The requests of the trace file `path`, arriving as recorded or at `arrival_rate` requests per second.

    `format`, `fields` and `end` are those of `Trace`.

    A server's steps are simulated (`schedule`), timed by `bench` or, without one, by `AssumedStepTime`. Requests above
    the limits are dropped, or with `clip` cut to them. `progress` is called with (bytes read, total bytes). The
    constructor raises InputError for a file that is not a trace, reading events raises it for an invalid line.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        arrival_rate: float | None = None,
        *,
        clip: bool = False,
        bench: Bench | None = None,
        format: str | None = None,  # noqa: A002 - as on the command line
        fields: Fields | None = None,
        end: End = "middle",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.arrival_rate = arrival_rate
        self.bench = bench
        self.decode_requests = 0
        self.cached_requests = 0
        self._prompt_tokens = self._new_tokens = 0
        self._last = 0.0
        self._clip = clip
        self._trace: Trace = Trace(
            path,
            format=format,
            fields=fields,
            end=end,
            progress=None if progress is None else lambda done: progress(done, self._trace.size),
        )
        self._admission: Admission | None = None

    @property
    def uncertain(self) -> bool:
        """Whether the lengths are known only by interval, and the requests drawn at the given `end`."""
        return self._trace.lengths is not None

    @cached_property
    def objective(self) -> Objective:
        """Seconds of the bench file, or tokens."""
        return Tokens() if self.bench is None else Seconds(self.bench.rising())

    @cached_property
    def _mean_rate(self) -> float | None:
        """The trace's own arrival rate; costs a pass over the file, so it is read only when arrivals are to move."""
        return self._trace.summary().rate if self._trace.has_times else None

    @cached_property
    def step_time(self) -> StepTime:
        """Step times of a server, for the simulation."""
        return AssumedStepTime() if self.bench is None else BenchStepTime(self.bench.rising())

    def events(self, limits: Limits, prompt_batch: int) -> Iterator[PromptGroup | DecodeRun]:
        """Yield the steps of a server under `limits`, at most `prompt_batch` prompts admitted at a time."""
        return schedule(
            self._admitted(limits),
            limits,
            step_time=self.step_time,
            arrival_rate=self.arrival_rate,
            mean_rate=None if self.arrival_rate is None else self._mean_rate,
            prompt_batch=prompt_batch,
        )

    def requests(self, limits: Limits) -> Iterator[TrafficRequest]:
        """Yield the requests that `limits` admit, in order, with their arrival times."""
        mean = None if self.arrival_rate is None else self._mean_rate
        for time, request in arrivals(self._admitted(limits), self.arrival_rate, mean):
            yield request._replace(time=time)

    def _admitted(self, limits: Limits) -> Iterator[TrafficRequest]:
        self._admission = Admission(limits, clip=self._clip)
        self._trace.limit(limits.longest_prompt, limits.max_model_len)
        self.decode_requests = self.cached_requests = self._prompt_tokens = self._new_tokens = 0
        return self._counted(self._admission(self._trace))

    def _counted(self, requests: Iterable[TrafficRequest]) -> Iterator[TrafficRequest]:
        for request in requests:
            self._prompt_tokens += request.prompt
            self._last = request.time
            self._new_tokens += request.output
            self.decode_requests += request.output > 1
            self.cached_requests += request.cached > 0
            yield request

    def counts(self) -> dict[str, int]:
        """Return counts of requests admitted, above each limit and clipped, and of incomplete lines."""
        found = {"skipped_empty": self._trace.skipped_empty, "out_of_order": self._trace.out_of_order}
        if self._admission is None:
            return found
        known = self._admission
        return {
            "admitted": known.admitted,
            "above_prompt": known.above_prompt,
            "above_total": known.above_total,
            "clipped": known.clipped,
            **found,
        }

    def facts(self) -> dict[str, str | int | float]:
        """Return the input and the replay settings, for a plan's provenance."""
        admitted = self.counts().get("admitted", 0)
        facts: dict[str, str | int | float] = {"traffic_sha256": self._trace.digest(), "requests": admitted}
        if admitted:
            facts["mean_prompt_tokens"] = round(self._prompt_tokens / admitted, 1)
            facts["mean_new_tokens"] = round(self._new_tokens / admitted, 1)
        if self.uncertain:
            facts["lengths"] = "by interval"
        left_out = 0 if self._admission is None else self._admission.left_out
        if left_out:
            facts["requests_left_out"] = left_out
        if self._clip:
            facts["requests_clipped"] = self.counts().get("clipped", 0)
        if self.arrival_rate is not None:
            facts["arrival_rate"] = "inf" if self.arrival_rate == float("inf") else self.arrival_rate
        facts["cost"] = self.objective.unit
        if self.bench is not None:
            facts["bench_sha256"] = self.bench.digest()
        return facts

    def period(self) -> Period:
        """Return the time of the admitted requests as recorded, once they are read."""
        return Period(self._trace.start, self._last)

    def notes(self) -> list[str]:
        """Return notes on requests above the limits, and on skipped lines."""
        found = self._trace.counted()
        if self._admission is not None and (self._admission.left_out or self._admission.clipped):
            found.insert(0, self._admission.note())
        return found
