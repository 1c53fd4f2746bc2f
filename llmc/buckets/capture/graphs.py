"""Graph capture under a memory budget: as many graphs as fit, in the order that users chose.

Prompt graphs are captured within their share, decode graphs within theirs, then each phase within what is left of all.
A graph that is predicted not to fit is passed over, and smaller ones behind it are still tried. The guide hands memory
on only where a phase has all its graphs; here also where neither has, or memory would stay unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.capture.device import CaptureDevice, checked
from llmc.buckets.capture.options import CaptureOptions
from llmc.buckets.capture.order import STRATEGIES
from llmc.buckets.capture.predict import Predictor, SizeOf
from llmc.buckets.render.text import size_text
from llmc.errors import DeviceError, OutOfDeviceMemoryError


@dataclass(frozen=True)
class Captured:
    """A graph: `size` bytes that its capture took of the device, `predicted` bytes before."""

    bucket: Bucket
    size: int
    predicted: int


@dataclass(frozen=True)
class Uncaptured:
    """A bucket that runs without a graph, and why."""

    bucket: Bucket
    why: str


@dataclass(frozen=True)
class PhaseOutcome:
    """One phase: `share` bytes were its own; `captured` in the order of capture, `uncaptured` in that of the queue."""

    phase: Phase
    share: int
    captured: tuple[Captured, ...]
    uncaptured: tuple[Uncaptured, ...]

    @property
    def used(self) -> int:
        """Bytes of all its graphs."""
        return sum(graph.size for graph in self.captured)

    @property
    def candidates(self) -> int:
        """Buckets of the phase."""
        return len(self.captured) + len(self.uncaptured)

    def steps_captured(self, steps: Mapping[Bucket, int]) -> float | None:
        """Of the phase's `steps` of traffic, the share that replays a graph, 0 … 1; None where it has no step."""
        own = [steps.get(graph.bucket, 0) for graph in self.captured]
        total = sum(own) + sum(steps.get(one.bucket, 0) for one in self.uncaptured)
        return sum(own) / total if total else None

    @property
    def percent(self) -> float:
        """Of the buckets, those captured; 100 where there are none."""
        return 100 * len(self.captured) / self.candidates if self.candidates else 100.0


@dataclass(frozen=True)
class Outcome:
    """All phases: `free` bytes there were before, `budget` of them for graphs; `notes` on what was odd, in words."""

    free: int
    budget: int
    phases: tuple[PhaseOutcome, ...]
    notes: tuple[str, ...] = ()

    @property
    def used(self) -> int:
        """Bytes of all graphs."""
        return sum(phase.used for phase in self.phases)

    @property
    def empty(self) -> bool:
        """Whether no bucket has a graph."""
        return not any(phase.captured for phase in self.phases)

    @property
    def uncaptured(self) -> tuple[Uncaptured, ...]:
        """Every bucket that runs without a graph."""
        return tuple(one for phase in self.phases for one in phase.uncaptured)


NOT_YET = "not captured yet"
"""Why a bucket has no graph whose turn has not come."""


@dataclass(frozen=True)
class Attempt:
    """A graph about to be captured: place `number` (from 1) of `of` in its phase's order, with `free` bytes left."""

    bucket: Bucket
    number: int
    of: int
    free: int


Report = Callable[[Attempt], None]


def capture(
    device: CaptureDevice, buckets: Sequence[Bucket], margin: int, options: CaptureOptions,
    expected: Mapping[Phase, SizeOf] | None = None, tell: Report = lambda _: None,
) -> Outcome:  # fmt: skip
    """Capture graphs until no more fit, see Capture; `tell` is called before each."""
    whole = Capture(device, buckets, margin, options, expected, tell)
    for _ in whole.run():
        pass
    return whole.outcome


class Capture:
    """The capture of graphs until no more fit, one at a time; `margin` bytes of the device stay free (Memory.margin).

    The budget is what is free now beyond the margin, or nothing where nothing is reserved for graphs; it never grows,
    whatever the device says later. A graph is charged with the larger one of what the device says it took and of what
    is less free than after the graph before, whoever took it. A device out of memory ends the capture: its graphs stay,
    all other buckets run uncaptured. A bucket that the device cannot capture for another reason is passed over.
    `expected` are the sizes to go by before a phase's first measurement; without them the first graph of a phase is
    captured where any memory is left. `tell` is called before each capture. Raises DeviceError for free memory that is
    no number of bytes, and what the device raises.
    """

    def __init__(
        self, device: CaptureDevice, buckets: Sequence[Bucket], margin: int, options: CaptureOptions,
        expected: Mapping[Phase, SizeOf] | None = None, tell: Report = lambda _: None,
    ) -> None:  # fmt: skip
        self._device, self._report = device, tell
        sizes = expected or {}
        self._queues = {phase: _Queue(phase, buckets, options, sizes.get(phase)) for phase in PHASES}
        self._free = self._begin = checked(device.free_memory())
        self._reserved = options.graph_reserved_mem > 0
        self._budget = max(0, self._free - margin) if self._reserved else 0
        prompt = int(self._budget * options.graph_prompt_ratio)
        self._shares: dict[Phase, int] = {"prompt": prompt, "decode": self._budget - prompt}
        self._grown = self._taken = 0
        self._out_of_memory: Bucket | None = None

    def run(self) -> Iterator[Bucket]:
        """Capture one graph after the other, each when it is asked for; the bucket of each."""
        for phase in PHASES:
            yield from self._pass(self._queues[phase], self._shares[phase])
        for queue in self._queues.values():
            yield from self._pass(queue, self._budget - sum(one.used for one in self._queues.values()))

    @property
    def outcome(self) -> Outcome:
        """What is captured by now, and why the other buckets are not."""
        phases = (
            PhaseOutcome(
                phase, self._shares[phase], tuple(queue.captured.values()),
                tuple(Uncaptured(b, queue.why.get(b, NOT_YET)) for b in queue.order if b not in queue.captured),
            )
            for phase, queue in self._queues.items()
        )  # fmt: skip
        return Outcome(self._begin, self._budget, tuple(phases), tuple(self._notes()))

    def _pass(self, queue: _Queue, room: int) -> Iterator[Bucket]:
        """Capture what fits into `room` bytes; what does not stays, with the reason."""
        for number, bucket in enumerate(queue.order, 1):
            if bucket in queue.captured or bucket in queue.refused:
                continue
            if self._out_of_memory is not None:
                queue.why[bucket] = f"the device ran out of memory while capturing {self._out_of_memory}"
                continue
            if not self._reserved:
                queue.why[bucket] = "no memory is reserved for graphs (--graph-reserved-mem 0)"
                continue
            predicted = queue.predict(bucket)
            if not 0 < room >= predicted:
                reported = f"about {size_text(predicted)}" if predicted else "an unknown size"
                queue.why[bucket] = f"does not fit: {reported}, {size_text(max(0, room))} left"
                continue
            size = self._one(queue, bucket, number)
            if size is not None:
                room -= size
                queue.captured[bucket] = Captured(bucket, size, predicted)
                yield bucket

    def _one(self, queue: _Queue, bucket: Bucket, number: int) -> int | None:
        """Capture one graph: the bytes to charge, or None where the device could not."""
        before = self._free
        self._report(Attempt(bucket, number, len(queue.order), before))
        try:
            said = self._device.capture(bucket)
        except OutOfDeviceMemoryError:
            self._out_of_memory = bucket
            queue.why[bucket] = "the device ran out of memory"
            queue.refused.add(bucket)
            return None
        except DeviceError as e:
            queue.why[bucket] = f"the device cannot capture it: {e}"
            queue.refused.add(bucket)
            return None
        self._free = checked(self._device.free_memory())
        self._grown += max(0, self._free - before)
        size = max(said, before - self._free, 0)
        self._taken += size
        queue.predict.add(bucket, size)
        return size

    def _notes(self) -> Iterator[str]:
        if self._out_of_memory is not None:
            yield (f"the device ran out of memory while capturing {self._out_of_memory}; lower --graph-reserved-mem or "
                   "--gpu-memory-utilization")  # fmt: skip
        if self._taken > self._budget:
            yield (f"graphs took {size_text(self._taken - self._budget)} more than the {size_text(self._budget)} for "
                   "them: the margin is smaller by as much")  # fmt: skip
        if self._grown:
            yield f"{size_text(self._grown)} of memory became free while graphs were captured; not used"


class _Queue:
    """The buckets of one phase in their order, and what became of them; `refused`: they are not tried again."""

    def __init__(self, phase: Phase, buckets: Sequence[Bucket], options: CaptureOptions, expected: SizeOf | None):
        own = [bucket for bucket in buckets if bucket.phase == phase]
        self.order = sorted(own, key=STRATEGIES[options.strategy(phase)])
        self.predict = Predictor(expected)
        self.captured: dict[Bucket, Captured] = {}
        self.refused: set[Bucket] = set()
        self.why: dict[Bucket, str] = {}

    @property
    def used(self) -> int:
        """Bytes of its graphs."""
        return sum(graph.size for graph in self.captured.values())
