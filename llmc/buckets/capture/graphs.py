"""Graph capture under a memory budget: as many graphs as fit, in the user's chosen order.

Prompt graphs are captured within their share and decode graphs within theirs. Then each phase uses the remaining
memory. A graph that is predicted not to fit is skipped, and smaller ones after it are still tried. The guide passes
memory on only from a phase that has all its graphs. Here it is also passed on when neither phase is complete, to leave
none unused.
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
    """A captured graph: `size` bytes of device memory, `predicted` bytes before the capture."""

    bucket: Bucket
    size: int
    predicted: int


@dataclass(frozen=True)
class Uncaptured:
    """A bucket that runs without a graph, and the reason."""

    bucket: Bucket
    why: str


@dataclass(frozen=True)
class PhaseOutcome:
    """Capture results of one phase: its `share` in bytes, `captured` in capture order, `uncaptured` in queue order."""

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
        """Return the fraction of the phase's `steps` that replays a graph, 0 … 1; None without steps."""
        own = [steps.get(graph.bucket, 0) for graph in self.captured]
        total = sum(own) + sum(steps.get(one.bucket, 0) for one in self.uncaptured)
        return sum(own) / total if total else None

    @property
    def percent(self) -> float:
        """Percentage of the buckets that are captured; 100 without buckets."""
        return 100 * len(self.captured) / self.candidates if self.candidates else 100.0


@dataclass(frozen=True)
class CaptureResults:
    """Capture results of all phases: `free` bytes before capture, the graph `budget` in bytes, and warning `notes`."""

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
"""The reason given for a bucket that is still in the queue."""


@dataclass(frozen=True)
class Attempt:
    """A graph about to be captured: `number` (from 1) `of` the graphs of its phase, with `free` bytes left."""

    bucket: Bucket
    number: int
    of: int
    free: int


OnCapture = Callable[[Attempt], None]


def capture(
    device: CaptureDevice, buckets: Sequence[Bucket], margin: int, options: CaptureOptions,
    expected: Mapping[Phase, SizeOf] | None = None, on_progress: OnCapture = lambda _: None,
) -> CaptureResults:  # fmt: skip
    """Capture graphs until no more fit, with the rules of Capture; `on_progress` is called before each."""
    whole = Capture(device, buckets, margin, options, expected, on_progress)
    for _ in whole.run():
        pass
    return whole.outcome


class Capture:
    """Captures graphs one at a time until no more fit; `margin` bytes of the device stay free (Memory.margin).

    The budget is the memory that is free now beyond the margin, or 0 where nothing is reserved for graphs. It never
    grows. A graph is charged with the larger of its reported size and the drop in free memory since the previous graph,
    whatever caused the drop. When the device runs out of memory, capture ends: existing graphs stay, all other buckets
    run uncaptured. A bucket that fails for another reason is skipped.

    `expected` gives sizes before a phase's first measurement. Without it, the first graph of a phase is captured if any
    memory is left. `on_progress` is called before each capture. Raises DeviceError if the reported free memory is not a
    number of bytes; errors of the device propagate.
    """

    def __init__(
        self, device: CaptureDevice, buckets: Sequence[Bucket], margin: int, options: CaptureOptions,
        expected: Mapping[Phase, SizeOf] | None = None, on_progress: OnCapture = lambda _: None,
    ) -> None:  # fmt: skip
        self._device, self._report = device, on_progress
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
        """Capture one graph per iteration, and yield its bucket."""
        for phase in PHASES:
            yield from self._pass(self._queues[phase], self._shares[phase])
        for queue in self._queues.values():
            yield from self._pass(queue, self._budget - sum(one.used for one in self._queues.values()))

    @property
    def outcome(self) -> CaptureResults:
        """The graphs captured so far, and why the other buckets have none."""
        phases = (
            PhaseOutcome(
                phase, self._shares[phase], tuple(queue.captured.values()),
                tuple(Uncaptured(b, queue.why.get(b, NOT_YET)) for b in queue.order if b not in queue.captured),
            )
            for phase, queue in self._queues.items()
        )  # fmt: skip
        return CaptureResults(self._begin, self._budget, tuple(phases), tuple(self._notes()))

    def _pass(self, queue: _Queue, room: int) -> Iterator[Bucket]:
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
        """Return the bytes to charge for the graph, or None where the device could not capture it."""
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
            yield (f"graphs took {size_text(self._taken - self._budget)} more than their budget of "
                   f"{size_text(self._budget)}; the margin shrinks by the same amount")  # fmt: skip
        if self._grown:
            yield f"{size_text(self._grown)} of memory became free while graphs were captured; not used"


class _Queue:
    """The buckets of one phase in order, with their results; `refused` buckets are not tried again."""

    def __init__(self, phase: Phase, buckets: Sequence[Bucket], options: CaptureOptions, expected: SizeOf | None):
        own = [bucket for bucket in buckets if bucket.phase == phase]
        self.order = sorted(own, key=STRATEGIES[options.strategy(phase)])
        self.predict = Predictor(expected)
        self.captured: dict[Bucket, Captured] = {}
        self.refused: set[Bucket] = set()
        self.why: dict[Bucket, str] = {}

    @property
    def used(self) -> int:
        return sum(graph.size for graph in self.captured.values())
