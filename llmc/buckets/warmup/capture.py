"""Graph capture under a memory budget: as many graphs as fit, in the order that users chose.

Prompt graphs are captured within their share, decode graphs within theirs, then each phase within what is left of all.
A graph that is predicted not to fit is passed over, and smaller ones behind it are still tried. The guide hands memory
on only where a phase has all its graphs; here also where neither has, or memory would stay unused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.warmup.options import CaptureOptions
from llmc.buckets.warmup.order import STRATEGIES
from llmc.buckets.warmup.outcome import Captured, Outcome, PhaseOutcome, Uncaptured
from llmc.buckets.warmup.predict import Predictor, SizeOf
from llmc.buckets.warmup.sizes import checked, size_text
from llmc.errors import OutOfDeviceMemoryError


class CaptureDevice(Protocol):
    """A device that records graphs, weights and KV cache already on it."""

    def free_memory(self) -> int:
        """Bytes that are free now."""
        ...

    def capture(self, bucket: Bucket) -> int:
        """Run the bucket through the function that serves, record its graph, and return the bytes that it took.

        Raises OutOfDeviceMemoryError when there is no room.
        """
        ...


@dataclass(frozen=True)
class Attempt:
    """A graph about to be captured: place `number` (from 1) of `of` in its phase's order, with `free` bytes left."""

    bucket: Bucket
    number: int
    of: int
    free: int


Tell = Callable[[Attempt], None]


def capture(
    device: CaptureDevice, buckets: Sequence[Bucket], margin: int, options: CaptureOptions,
    expected: Mapping[Phase, SizeOf] | None = None, tell: Tell = lambda _: None,
) -> Outcome:  # fmt: skip
    """Capture graphs until no more fit; `margin` bytes of the device stay free (Memory.margin).

    The budget is what is free now beyond the margin, or nothing where nothing is reserved for graphs; it never grows,
    whatever the device says later. A graph is charged with the larger one of what the device says it took and of what
    is less free than after the graph before, whoever took it. A device out of memory ends the capture: its graphs stay,
    all other buckets run uncaptured. `expected` are the sizes to go by before a phase's first measurement; without them
    the first graph of a phase is captured where any memory is left. `tell` is called before each capture. Raises
    DeviceError for free memory that is no number of bytes, and what the device raises.
    """
    return _Capture(device, buckets, margin, options, expected or {}, tell).run()


class _Queue:
    """The buckets of one phase in their order, and what became of them."""

    def __init__(self, phase: Phase, buckets: Sequence[Bucket], options: CaptureOptions, expected: SizeOf | None):
        own = [bucket for bucket in buckets if bucket.phase == phase]
        self.order = sorted(own, key=STRATEGIES[options.strategy(phase)])
        self.waiting = list(enumerate(self.order, 1))
        self.predict = Predictor(expected)
        self.captured: list[Captured] = []
        self.why: dict[Bucket, str] = {}

    @property
    def used(self) -> int:
        return sum(graph.size for graph in self.captured)


class _Capture:
    """One run of `capture`."""

    def __init__(
        self, device: CaptureDevice, buckets: Sequence[Bucket], margin: int, options: CaptureOptions,
        expected: Mapping[Phase, SizeOf], tell: Tell,
    ) -> None:  # fmt: skip
        self._device, self._tell = device, tell
        self._queues = {phase: _Queue(phase, buckets, options, expected.get(phase)) for phase in PHASES}
        self._free = self._begin = checked(device.free_memory())
        self._budget = max(0, self._free - margin) if options.graph_reserved_mem else 0
        prompt = int(self._budget * options.graph_prompt_ratio)
        self._shares: dict[Phase, int] = {"prompt": prompt, "decode": self._budget - prompt}
        self._grown = self._taken = 0
        self._out_of_memory: Bucket | None = None

    def run(self) -> Outcome:
        for phase in PHASES:
            self._pass(self._queues[phase], self._shares[phase])
        for queue in self._queues.values():
            self._pass(queue, self._budget - sum(one.used for one in self._queues.values()))
        phases = [
            PhaseOutcome(
                phase, self._shares[phase], tuple(queue.captured),
                tuple(Uncaptured(bucket, queue.why[bucket]) for _, bucket in queue.waiting),
            )
            for phase, queue in self._queues.items()
        ]  # fmt: skip
        return Outcome(self._begin, self._budget, tuple(phases), tuple(self._notes()))

    def _pass(self, queue: _Queue, room: int) -> None:
        """Capture what fits into `room` bytes; what does not stays waiting, with the reason."""
        left: list[tuple[int, Bucket]] = []
        for number, bucket in queue.waiting:
            if self._out_of_memory is None:
                predicted = queue.predict(bucket)
                if 0 < room >= predicted:
                    size = self._one(queue, bucket, number)
                    if size is not None:
                        room -= size
                        queue.captured.append(Captured(bucket, size, predicted))
                        continue
                else:
                    told = f"about {size_text(predicted)}" if predicted else "an unknown size"
                    queue.why[bucket] = f"does not fit: {told}, {size_text(max(0, room))} left"
            if self._out_of_memory is not None:
                first = bucket == self._out_of_memory
                queue.why[bucket] = "the device ran out of memory" + (
                    "" if first else f" while capturing {self._out_of_memory}"
                )
            left.append((number, bucket))
        queue.waiting = left

    def _one(self, queue: _Queue, bucket: Bucket, number: int) -> int | None:
        """Capture one graph: the bytes to charge, or None where the device had no room."""
        before = self._free
        self._tell(Attempt(bucket, number, len(queue.order), before))
        try:
            said = self._device.capture(bucket)
        except OutOfDeviceMemoryError:
            self._out_of_memory = bucket
            return None
        self._free = checked(self._device.free_memory())
        self._grown += max(0, self._free - before)
        size = max(said, before - self._free, 0)
        self._taken += size
        queue.predict.add(bucket, size)
        return size

    def _notes(self) -> list[str]:
        found = []
        if self._out_of_memory is not None:
            found.append(f"the device ran out of memory while capturing {self._out_of_memory}; lower "
                         "--graph-reserved-mem or --gpu-memory-utilization")  # fmt: skip
        if self._taken > self._budget:
            found.append(f"graphs took {size_text(self._taken - self._budget)} more than the {size_text(self._budget)} "
                         "for them: the margin is smaller by as much")  # fmt: skip
        if self._grown:
            found.append(f"{size_text(self._grown)} of memory became free while graphs were captured; not used")
        return found
