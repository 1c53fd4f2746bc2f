"""Steps that a server counted itself, read from its logs in place of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

StepPhase = Literal["prompt", "decode", "any"]
"""Phase of a step; "any" where the log does not record it, or prompts and decodes share steps."""

Shape = tuple[int, ...]
"""The sizes of a step, one for each axis of the histogram."""


class StepKey(NamedTuple):
    """A step of `shape` that the server ran as `ran`; None where the log does not record it."""

    phase: StepPhase
    shape: Shape
    ran: Shape | None


@dataclass(frozen=True)
class StepHistogram:
    """Counts of a server's steps.

    axes      the numbers of a shape: ("tokens",), or ("batch", "query", "blocks")
    counts    steps by shape
    counted   all "steps", or only "misses", those that no prepared graph covered
    padded    whether shapes are sizes after padding, which leaves a step's real tokens unknown
    prepared  prepared shapes by phase, where the log lists them
    notes     skipped or double-counted contents
    """

    axes: tuple[str, ...]
    counts: Mapping[StepKey, int]
    counted: Literal["steps", "misses"] = "steps"
    padded: bool = False
    prepared: Mapping[StepPhase, tuple[Shape, ...]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Total number of steps."""
        return sum(self.counts.values())

    @property
    def padding(self) -> float | None:
        """(padded − real) / real in tokens, over the steps with a recorded padded size; None without any."""
        if "tokens" not in self.axes:
            return None
        axis = self.axes.index("tokens")
        real = ran = 0
        for key, count in self.counts.items():
            if key.ran is not None:
                real += key.shape[axis] * count
                ran += key.ran[axis] * count
        return ran / real - 1 if real else None
