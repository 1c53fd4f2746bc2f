"""Times of the parts of a compile that executables share: stages, and verification.

Measurements of this store win: the last builds of a stage for a model of the same size. Otherwise the times of
SmolLM2-135M on two cores (Timing) are scaled to the model's size: tracing with its layers, everything else with its
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from llmc.compiler.targets.costs import LAYERS, REFERENCE, Timing

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.architectures.shared.size import ModelSize
    from llmc.compiler.estimates.verification_work import VerifyWork
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.costs import Costs

RECENT = 32
"""Builds of the store that a typical time is taken from."""

METADATA = "parameters"
"""What an entry of a stage says of its model."""


class Durations:
    """For one model, device and options (configured); `store` None: nothing was measured."""

    def __init__(
        self, costs: Costs, options: CompileOptions, model: ModelSize | None, parameters: int, store: Store | None
    ) -> None:
        self._costs, self._options, self._store = costs, options, store
        self._layers, self._parameters = (model.layers if model else LAYERS), parameters

    def stages(self, buckets: Sequence[Bucket], without: Iterable[str] = ()) -> dict[str, float]:
        """Seconds of each shared stage that is not among `without`."""
        costs = self._costs.stage_costs(self._options, buckets)
        return {kind: self._stage(kind, cost) for kind, cost in costs.items() if kind not in without}

    def verification(self, work: VerifyWork, reference: bool = True) -> float:
        """Seconds of so much verification; without `reference`, its predictions are there."""
        each = self._costs.verifying
        seconds = (
            self._of(each.begin) + work.executables * self._of(each.opened) + work.steps * self._of(each.step)
            + work.tokens / 1000 * self._of(each.tokens)
        )  # fmt: skip
        return seconds + (self._stage("reference", REFERENCE) if reference else 0.0)

    def measured(self, kind: str) -> float | None:
        """Seconds of the last builds of a stage in the store; None where it has none."""
        if self._store is None:
            return None
        return typical(e for e in self._store.entries(kind) if e.meta.get(METADATA) == self._parameters)

    def _stage(self, kind: str, cost: Timing) -> float:
        seen = self.measured(kind)
        return self._of(cost) if seen is None else seen

    def _of(self, cost: Timing) -> float:
        return cost.of(self._layers, self._parameters)


def typical(entries: Iterable[Entry]) -> float | None:
    """The median build time of the last of `entries`; None where there are none."""
    timed = (float(entry.meta["seconds"]) for entry in entries if "seconds" in entry.meta)
    recent = list(islice(timed, RECENT))
    return median(recent) if recent else None


def of_target(store: Store, target: str) -> Iterable[Entry]:
    """Executables of a target in the store."""
    return (entry for entry in store.entries("executable") if entry.key.components.get("target") == target)
