"""Device model: step times, and the time to move a prompt to the other device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError


@dataclass(frozen=True)
class Stage:
    """A device `name` with step times `times`, plus `overhead_s` per step for the engine (sampling, scheduling)."""

    name: str
    times: StepTime
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.overhead_s < math.inf:
            raise InputError(f"{self.name}: an overhead of {self.overhead_s} s a step must be a time of at least 0")

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds of a prefill of one prompt of `tokens` tokens."""
        return self.times.prompt((tokens,), (0,)) + self.overhead_s

    def decode_s(self, batch: int, longest: int, total: int) -> float:
        """Return the seconds of a decode step (arguments: StepTime)."""
        return self.times.decode(batch, longest, total) + self.overhead_s


@dataclass(frozen=True)
class Sharing:
    """Whether the two devices share their hardware.

    Separate devices (`shared` False) each run at their own speed. On the same cores, two concurrent steps take
    `contention` times the sum of their times: 1.0 is fair sharing, more means that they slow each other down.
    """

    shared: bool = False
    contention: float = 1.0

    def __post_init__(self) -> None:
        if not 0.5 <= self.contention < math.inf:
            raise InputError(
                f"a contention of {self.contention} is below 0.5, which means two steps at once, each at full speed"
            )

    @property
    def speed(self) -> float:
        """Each device's relative speed while both are busy."""
        return 1 / (2 * self.contention) if self.shared else 1.0


APART = Sharing()


@dataclass(frozen=True)
class Link:
    """Moves `token_bytes` per prompt token at `gb_per_s` (10⁹ bytes per second, export and import included).

    Before that, `latency_s` passes without occupying either device. Raises InputError for a number out of range.
    """

    token_bytes: int
    gb_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.token_bytes < 1:
            raise InputError(f"keys and values of a token take {self.token_bytes} bytes; give at least 1")
        if not 0 < self.gb_per_s < math.inf:
            raise InputError(f"a transport of {self.gb_per_s} GB/s moves nothing; give a rate above 0")
        if not 0 <= self.latency_s < math.inf:
            raise InputError(f"a transport's latency of {self.latency_s} s must be a time of at least 0")

    def bytes(self, tokens: int) -> int:
        """Return the bytes of a prompt of `tokens` tokens."""
        return self.token_bytes * tokens

    def moving_s(self, tokens: int) -> float:
        """Return the seconds to move a prompt, without the latency; half of them occupy either device."""
        return self.bytes(tokens) / self.gb_per_s / 1e9

    def total_s(self, tokens: int) -> float:
        """Return the seconds from the prompt's last step until its keys and values are in the other cache."""
        return self.latency_s + self.moving_s(tokens)
