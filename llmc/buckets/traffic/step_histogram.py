"""Steps that a server counted itself: what its logs tell in place of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

StepPhase = Literal["prompt", "decode", "any"]
"""What a step computes; "any" where the log does not tell, or prompts and decodes share steps."""

Shape = tuple[int, ...]
"""The sizes of a step, one for each axis of the histogram."""


class StepKey(NamedTuple):
    """A step of `shape` that the server ran as `ran`; None where the log does not tell."""

    phase: StepPhase
    shape: Shape
    ran: Shape | None


@dataclass(frozen=True)
class StepHistogram:
    """How often a server took which step.

    axes        what the numbers of a shape are: ("tokens",), or ("batch", "query", "blocks")
    counts      steps by shape
    counted     what is counted: all "steps", or "misses" alone, those that no prepared graph covered
    padded      whether shapes are sizes after padding, so that the tokens of a step are not known below that
    prepared    shapes by phase that the log says were prepared, where it does
    notes       what was left out, or counts twice
    """

    axes: tuple[str, ...]
    counts: Mapping[StepKey, int]
    counted: Literal["steps", "misses"] = "steps"
    padded: bool = False
    prepared: Mapping[StepPhase, tuple[Shape, ...]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Steps in all."""
        return sum(self.counts.values())

    @property
    def padding(self) -> float | None:
        """(padded − real) / real in tokens, over the steps whose padded size the log tells; None where none is."""
        if "tokens" not in self.axes:
            return None
        axis = self.axes.index("tokens")
        real = ran = 0
        for key, count in self.counts.items():
            if key.ran is not None:
                real += key.shape[axis] * count
                ran += key.ran[axis] * count
        return ran / real - 1 if real else None
