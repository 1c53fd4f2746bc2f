"""What a target is chosen for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.buckets.limits import Limits
    from llmc.compiler.architectures.shared.size import Weights


@dataclass(frozen=True)
class Deployment:
    """The case of a compile: a plan's limits and its facts (mean lengths of traffic), the model's configuration and its
    weights."""

    limits: Limits
    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    weights: Sequence[Weights]

    @property
    def parameters(self) -> int:
        """How many weights."""
        return sum(one.count for one in self.weights)
