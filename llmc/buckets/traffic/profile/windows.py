"""Traffic by stretches of time, however long it goes on, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.profile.sketch import LengthSketch, distance

MOST = 64
"""Windows that are kept; when there are more, each two become one of twice the length."""

BITS = 7
"""Of a window's sketches: lengths are within 1 part in 64."""


def _sketch() -> LengthSketch:
    return LengthSketch(BITS)


@dataclass
class Window:
    """The requests that arrived from `start` on, for `seconds`."""

    start: float
    seconds: float
    prompt: LengthSketch = field(default_factory=_sketch)
    output: LengthSketch = field(default_factory=_sketch)

    @property
    def requests(self) -> int:
        """Requests that arrived in it."""
        return self.prompt.number

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds

    def merge(self, other: Window) -> None:
        """Take the requests of the window that follows."""
        self.seconds += other.seconds
        self.prompt.merge(other.prompt)
        self.output.merge(other.output)


class Windows:
    """Windows of one length, each of which begins where the one before ends; requests come in order of time."""

    def __init__(self) -> None:
        self._seconds = 1.0
        self._found: dict[int, Window] = {}
        self._last = 0.0

    def add(self, request: TrafficRequest) -> None:
        """Count a request."""
        place = int(request.time / self._seconds)
        while place >= MOST:
            self._double()
            place = int(request.time / self._seconds)
        self._last = request.time
        window = self._window(self._found, place)
        window.prompt.add(request.prompt)
        window.output.add(request.output)

    def _double(self) -> None:
        self._seconds *= 2
        joined: dict[int, Window] = {}
        for place, window in self._found.items():
            into = self._window(joined, place // 2)
            into.prompt.merge(window.prompt)
            into.output.merge(window.output)
        self._found = joined

    def _window(self, among: dict[int, Window], place: int) -> Window:
        if place not in among:
            among[place] = Window(place * self._seconds, self._seconds)
        return among[place]

    def found(self, most: int) -> list[Window]:
        """At most `most` windows of equal length, those without a request too; the last ends with the last request."""
        if not self._found:
            return []
        number = max(self._found) + 1
        each = -(-number // most)
        found = []
        for first in range(0, number, each):
            joined = Window(first * self._seconds, 0.0)
            for place in range(first, min(first + each, number)):
                joined.merge(self._found.get(place) or Window(place * self._seconds, self._seconds))
            found.append(joined)
        if self._last > found[-1].start:
            found[-1].seconds = self._last - found[-1].start
        return found


def drift(windows: list[Window]) -> tuple[float, float]:
    """How far the lengths of the window that differs most are from those of all: of prompts, and of outputs, 0 to 1."""
    whole = Window(0.0, 1.0)
    for window in windows:
        whole.merge(window)
    return (
        max((distance(window.prompt, whole.prompt) for window in windows), default=0.0),
        max((distance(window.output, whole.output) for window in windows), default=0.0),
    )
