"""Divide a device's memory and capture graphs, before there is an engine.

`llmc warmup` and servers do the same: `divide` creates the KV cache, warming.py runs every bucket, then `run` captures
graphs. Each step is logged at INFO in the format of vLLM's Gaudi guide, anomalies as warnings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmc.buckets.bucket import PHASES, Bucket
from llmc.buckets.capture.device import checked
from llmc.buckets.capture.graphs import Attempt, Capture
from llmc.buckets.capture.log import CaptureLog, budget_line, hold_none, took_line, uncaptured_lines
from llmc.buckets.capture.memory import profile
from llmc.buckets.capture.options import CaptureOptions
from llmc.buckets.render.text import size_text
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.capture.device import GraphDevice
    from llmc.buckets.capture.graphs import CaptureResults
    from llmc.buckets.capture.memory import Memory
    from llmc.buckets.plan import Plan
    from llmc.runtime.executors.base import Executor

_log = logging.getLogger("llmc")


@dataclass(frozen=True)
class CaptureChoice:
    """How memory is divided, and the command-line `flags` that set it."""

    options: CaptureOptions = field(default_factory=CaptureOptions)
    flags: tuple[str, ...] = ()


class Capturing:
    """The graphs of one startup, on the device of `executor`; `memory` is set by `divide`."""

    def __init__(self, executor: Executor, device: GraphDevice, plan: Plan, options: CaptureOptions) -> None:
        self.device = device
        self.options = options
        self.memory: Memory | None = None
        self.lines = CaptureLog.of(plan.buckets, plan.limits.block_size)
        self._executor, self._plan = executor, plan
        self._capture: Capture | None = None
        self._began = time.monotonic()

    @classmethod
    def of(cls, executor: Executor, plan: Plan, choice: CaptureChoice) -> Capturing | None:
        """Return a Capturing if the executor's device captures graphs, else None; variables have no effect there.

        Raises InputError if a flag was given for a device that captures none.
        """
        device = executor.capabilities.graph_device
        if device is not None:
            return cls(executor, device, plan, choice.options)
        if choice.flags:
            raise InputError(
                f"{choice.flags[0]}: {executor.bundle.manifest.device} captures no graphs, so there is no memory to "
                "divide; leave it out"
            )
        return None

    @property
    def outcome(self) -> CaptureResults | None:
        """Graphs captured so far; None before the first attempt."""
        return None if self._capture is None else self._capture.outcome

    @property
    def failure(self) -> str:
        """Why no bucket has a graph although graphs were requested, or ""."""
        outcome = self.outcome
        if outcome is None or not outcome.empty or not self.options.graph_reserved_mem:
            return ""
        return hold_none(outcome, self._plan.buckets, self.device.expected)

    def report(self, shown: int | None = None) -> list[str]:
        """Describe the memory division and the captures so far; `shown` limits the uncaptured buckets per phase."""
        if self.memory is None:
            return []
        outcome = self.outcome
        lines = self.memory.text(0 if outcome is None else outcome.used).splitlines()
        if outcome is not None:
            lines += ["", budget_line(outcome, self.options, self.device.graphs), *self._reported(outcome, shown)]
            lines += outcome.notes
        return lines

    def _reported(self, outcome: CaptureResults, shown: int | None = None) -> list[str]:
        return [*map(self.lines.summary, outcome.phases), *uncaptured_lines(outcome, self.lines, shown)]

    def divide(self) -> Memory:
        """Run the largest prompt bucket, divide the memory that is then free, and create the KV cache.

        Raises InputError if the cache has no room for one sequence, DeviceError if the device does not report memory,
        and errors of the device.
        """
        device, longest = self.device, self._executor.capacity
        memory = profile(device, self._plan, device.block_bytes, self.options, longest)
        used = memory.weights
        _log.info("%s", took_line("Loading model weights", memory.weights, used, memory.total))
        used += memory.profile_run
        _log.info("%s", took_line("Model profiling run", memory.profile_run, used, memory.total))
        _log.info("%s", memory.line(device.graphs))
        device.allocate(memory.blocks)
        used, before = memory.total - checked(device.free_memory()), used
        _log.info("%s", took_line("Initializing cache engine", used - before, used, memory.total))
        self.memory = memory
        self._began = time.monotonic()
        return memory

    def run(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        """Capture graphs of `buckets` within the memory budget, one for each item requested, then log a summary.

        Call `divide` first. Raises DeviceError if the device does not report memory, and errors that Capture does not
        handle.
        """
        assert self.memory is not None
        expected = dict.fromkeys(PHASES, self.device.expected)
        self._capture = Capture(self.device, buckets, self.memory.margin, self.options, expected, self._report)
        _log.info("%s", budget_line(self._capture.outcome, self.options, self.device.graphs))
        yield from self._capture.run()
        self._log_outcome(self._capture.outcome)

    def _report(self, attempt: Attempt) -> None:
        _log.info("%s", self.lines.captured(attempt))

    def _log_outcome(self, outcome: CaptureResults) -> None:
        for line in self._reported(outcome):
            _log.info("%s", line)
        for note in outcome.notes or filter(None, (self.failure,)):
            _log.warning("%s", note)
        seconds = time.monotonic() - self._began
        _log.info("Warmup finished in %.0f secs, allocated %s of device memory", seconds, size_text(outcome.used))
