"""What a capture did: the graphs of each phase, what runs uncaptured, and what was odd about the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.buckets.bucket import Bucket, Phase


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
