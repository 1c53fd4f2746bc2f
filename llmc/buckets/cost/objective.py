"""Objective functions for plan selection: the cost of many steps, computed at once.

`tokens` needs no device: batch · query new tokens of a prefill, batch · context cached tokens of a decode step. A bench
file gives seconds measured on a device instead.
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
    """Step cost, strictly increasing in batch, query and context, above 0."""

    unit: str

    def cost(self, phase: Phase, points: Points) -> NDArray[np.float64]:
        """Return the cost [n] of running the buckets `points` once each."""
        ...

    def step_price(self, phase: Phase) -> float:
        """Return the cost of one more step beyond `cost`, regardless of its size."""
        ...


class Tokens:
    """Padded tokens.

    Each pair of new and cached tokens in a prefill adds 1 / TOKEN_WEIGHT of a token. Between two buckets with equal new
    tokens, the smaller context is therefore cheaper (`work.cost`).
    """

    unit = "tokens"

    def cost(self, phase: Phase, points: Points) -> NDArray[np.float64]:
        """Return the padded tokens [n] of `points`."""
        batch, query, context = (points[:, i].astype(np.float64) for i in range(3))
        if phase == "decode":
            return batch * np.maximum(context, 0.5)
        return batch * query * (1.0 + context / TOKEN_WEIGHT)

    def step_price(self, phase: Phase) -> float:
        """Return a prefill's STEP_WEIGHT in tokens; 0 for decode, whose number of steps does not depend on the plan."""
        return STEP_WEIGHT / TOKEN_WEIGHT if phase == "prompt" else 0.0


class Seconds:
    """Seconds from a bench file, interpolated between measurements.

    `bench` must not fall as shapes grow (`Bench.rising`). A relative 1e-12 per token is added to make the smaller of
    two equally fast buckets cheaper.
    """

    unit = "seconds"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._tokens = Tokens()

    def cost(self, phase: Phase, points: Points) -> NDArray[np.float64]:
        """Return the seconds [n] of `points`."""
        seconds = self._bench.seconds(phase, points[:, 0], points[:, 1], points[:, 2])
        return seconds * (1.0 + 1e-12 * self._tokens.cost(phase, points))

    def step_price(self, phase: Phase) -> float:
        """Return 0: the measured seconds include a step's fixed time."""
        return 0.0
