"""A device as the model sees it: how long its steps take, and what moving a prompt to the other device takes."""

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


@dataclass(frozen=True)
class Link:
    """Moves `token_bytes` of each prompt token at `gb_per_s` (10⁹ bytes a second, export and import included), after
    `latency_s` during which neither device is busy with it.

    Raises InputError for a number that makes no sense.
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
        """Bytes of a prompt of so many tokens."""
        return self.token_bytes * tokens

    def moving_s(self, tokens: int) -> float:
        """Seconds of moving a prompt, without the latency: half of them occupy either device."""
        return self.bytes(tokens) / self.gb_per_s / 1e9

    def total_s(self, tokens: int) -> float:
        """Seconds from the prompt's last step until its keys and values are in the other cache."""
        return self.latency_s + self.moving_s(tokens)
