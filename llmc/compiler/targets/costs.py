"""Times of the parts of a compile by the model's size: of targets' own stages, and of those that all share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket

PARAMETERS, LAYERS = 134_515_008, 30
"""Of SmolLM2-135M, on which the costs were measured."""


@dataclass(frozen=True)
class Cost:
    """Seconds: a fixed part, a part for each layer, and a part for SmolLM2-135M's number of parameters."""

    fixed: float = 0.0
    layers: float = 0.0
    parameters: float = 0.0

    def of(self, layers: int, parameters: int) -> float:
        """For a model of such a size."""
        return self.fixed + self.layers * layers / LAYERS + self.parameters * parameters / PARAMETERS


TRACE = Cost(fixed=3.0, layers=1.0)
"""One trace in dialect fused. Few layers are traced; the others are made from these, and put into the graph."""

EXPORT = Cost(fixed=3.5, layers=2.5)
"""One trace in dialect two_part, and the writing of its program, layer by layer."""

LOWER = Cost(fixed=1.0, layers=3.0)
REFERENCE = Cost(fixed=2.0, parameters=12.0)
WEIGHTS = Cost(parameters=2.5)


@dataclass(frozen=True)
class Verifying:
    """Times of verification: a fixed part, each executable it opens, each step, and each 1,000 tokens of prompts
    (estimates/verification_work.py counts them)."""

    begin: Cost
    opened: Cost
    step: Cost
    tokens: Cost


def traces(buckets: Sequence[Bucket]) -> Cost:
    """Traces without and with a cache, as buckets need them."""
    times = len({bucket.context > 0 for bucket in buckets})
    return Cost(fixed=times * EXPORT.fixed, layers=times * EXPORT.layers)
