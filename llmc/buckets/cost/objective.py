"""The objective of a plan's choice: the cost of steps, computed for many steps at once.

`tokens` needs no device: batch · query new tokens of a prompt step, batch · context cached tokens of a decode step. A
bench file gives seconds measured on a device instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.cost.work import STEP_WEIGHT, TOKEN_WEIGHT

if TYPE_CHECKING:
    from llmc.buckets.bucket import Phase
    from llmc.buckets.cost.bench import Bench

Points = NDArray[np.int64]
"""[n, 3]: batch, query, context of each step."""


class Objective(Protocol):
    """Cost of steps, strictly increasing in batch, query and context, above 0."""

    unit: str

    def cost(self, phase: Phase, points: Points) -> NDArray[np.float64]:
        """Cost [n] of running the buckets `points` once each."""
        ...

    def step_price(self, phase: Phase) -> float:
        """What one more step costs beyond `cost`, whatever its size."""
        ...


class Tokens:
    """Padded tokens.

    A prompt step's cached context weighs 1 / TOKEN_WEIGHT of a new token for each new token that attends to it, so
    that of two buckets with equal new tokens the one with the smaller context is the cheaper (see `cost`).
    """

    unit = "tokens"

    def cost(self, phase: Phase, points: Points) -> NDArray[np.float64]:
        """As `Objective.cost`."""
        batch, query, context = (points[:, i].astype(np.float64) for i in range(3))
        if phase == "decode":
            return batch * np.maximum(context, 0.5)
        return batch * query * (1.0 + context / TOKEN_WEIGHT)

    def step_price(self, phase: Phase) -> float:
        """A prompt step's STEP_WEIGHT, in tokens; the number of decode steps is no choice."""
        return STEP_WEIGHT / TOKEN_WEIGHT if phase == "prompt" else 0.0


class Seconds:
    """Seconds from a bench file, interpolated between what was measured.

    `bench` must not fall as shapes grow (`Bench.rising`). A relative 1e-12 a token is added, so that of two buckets
    that take equally long the larger is never chosen for nothing.
    """

    unit = "seconds"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._tokens = Tokens()

    def cost(self, phase: Phase, points: Points) -> NDArray[np.float64]:
        """As `Objective.cost`."""
        seconds = self._bench.seconds(phase, points[:, 0], points[:, 1], points[:, 2])
        return seconds * (1.0 + 1e-12 * self._tokens.cost(phase, points))

    def step_price(self, phase: Phase) -> float:
        """Nothing: a step's fixed time is measured with it."""
        return 0.0
