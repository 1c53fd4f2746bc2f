"""The profile of a trace, from one pass over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.events import DecodeRun, TrafficRequest
from llmc.buckets.traffic.profile.sketch import LengthSketch
from llmc.buckets.traffic.profile.windows import Window, Windows
from llmc.buckets.traffic.schedule import schedule
from llmc.buckets.traffic.step_time import AssumedStepTime

MAX_WINDOWS = 32
"""Windows of a profile."""

LONGEST = 1 << 32
"""Above every sequence that a trace can hold."""


@dataclass(frozen=True)
class Profile:
    """What a trace looks like.

    prompt, output, total   lengths in tokens; total is prompt and output of a request together
    cached                  share of the prompts' tokens that were in the cache
    duration                seconds from the first request to the last; None for a trace without times
    running                 decode steps by how many sequences they have, on a simulated server (`schedule`,
                            `AssumedStepTime`) with `slots`; None for a trace without times
    windows                 the trace by stretches of time; none for a trace without times
    """

    prompt: LengthSketch
    output: LengthSketch
    total: LengthSketch
    cached: float
    duration: float | None
    running: LengthSketch | None
    slots: int
    windows: list[Window]

    @property
    def requests(self) -> int:
        """Requests in all."""
        return self.prompt.number

    @property
    def rate(self) -> float | None:
        """The mean arrival rate in requests a second, (requests − 1) / duration."""
        return (self.requests - 1) / self.duration if self.duration else None


def profile(requests: Iterable[TrafficRequest], *, has_times: bool, slots: int = 256) -> Profile:
    """The profile of `requests`, which are in order of time, in memory that their number is not in."""
    prompt, output, total, windows = LengthSketch(), LengthSketch(), LengthSketch(), Windows()
    last = cached = 0.0

    def counted() -> Iterator[TrafficRequest]:
        nonlocal last, cached
        for request in requests:
            prompt.add(request.prompt)
            output.add(request.output)
            total.add(request.prompt + request.output)
            cached += request.cached
            last = request.time
            if has_times:
                windows.add(request)
            yield request

    running = LengthSketch() if has_times else None
    if running is None:
        for _ in counted():
            pass
    else:
        for event in schedule(counted(), Limits(LONGEST, slots), step_time=AssumedStepTime()):
            if isinstance(event, DecodeRun):
                running.add(event.batch, event.steps)
    return Profile(
        prompt=prompt,
        output=output,
        total=total,
        cached=cached / prompt.total if prompt.total else 0.0,
        duration=last if has_times else None,
        running=running,
        slots=slots,
        windows=windows.found(MAX_WINDOWS),
    )
