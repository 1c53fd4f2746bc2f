"""A device as the model sees it: how long its steps take, and how two devices share a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError


@dataclass(frozen=True)
class Stage:
    """A device called `name` whose steps take `times`, and `overhead_s` each for the engine around them (sampling,
    scheduling)."""

    name: str
    times: StepTime
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.overhead_s < math.inf:
            raise InputError(f"{self.name}: an overhead of {self.overhead_s} s a step must be a time of at least 0")

    def prompt_s(self, tokens: int) -> float:
        """Seconds of a prompt of so many tokens, alone in its step."""
        return self.times.prompt((tokens,), (0,)) + self.overhead_s

    def decode_s(self, batch: int, longest: int, total: int) -> float:
        """Seconds of a decode step, see StepTime."""
        return self.times.decode(batch, longest, total) + self.overhead_s


@dataclass(frozen=True)
class Sharing:
    """What the two devices have in common.

    Apart (`shared` False), each runs at its own speed. Where they are the same cores, two steps that run at once take
    `contention` times the sum of their times: 1.0 is a fair share of one machine, more where they stand in each other's
    way.
    """

    shared: bool = False
    contention: float = 1.0

    def __post_init__(self) -> None:
        if not 0.5 <= self.contention < math.inf:
            raise InputError(f"a contention of {self.contention} is below 0.5: two steps at once, each at full speed")

    @property
    def speed(self) -> float:
        """Of either device, in shares of its own speed, while both are busy."""
        return 1 / (2 * self.contention) if self.shared else 1.0


APART = Sharing()
