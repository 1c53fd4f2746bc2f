"""What it takes to hand a prompt's keys and values from one device to the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmc.errors import InputError


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
