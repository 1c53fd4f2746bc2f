"""Times of the shared parts of a compile: stages and verification.

Measurements in this store come first: the last builds of a stage for a model of the same size. Without them the times
of SmolLM2-135M on two cores (Timing) are scaled to the model. Tracing scales with its layers, everything else with its
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
"""Recent builds in the store whose median is the typical time."""

METADATA = "parameters"
"""Name of the parameter count in a stage entry's metadata."""


class Durations:
    """Durations for one model, device and configured options; without a `store` all are estimates."""

    def __init__(
        self, costs: Costs, options: CompileOptions, model: ModelSize | None, parameters: int, store: Store | None
    ) -> None:
        self._costs, self._options, self._store = costs, options, store
        self._layers, self._parameters = (model.layers if model else LAYERS), parameters

    def stages(self, buckets: Sequence[Bucket], without: Iterable[str] = ()) -> dict[str, float]:
        """Seconds of each shared stage, except those in `without`."""
        costs = self._costs.stage_costs(self._options, buckets)
        return {kind: self._stage(kind, cost) for kind, cost in costs.items() if kind not in without}

    def verification(self, work: VerifyWork, reference: bool = True) -> float:
        """Seconds of this much verification; `reference` False leaves out the reference's run."""
        each = self._costs.verifying
        seconds = (
            self._of(each.begin) + work.executables * self._of(each.opened) + work.steps * self._of(each.step)
            + work.tokens / 1000 * self._of(each.tokens)
        )  # fmt: skip
        return seconds + (self._stage("reference", REFERENCE) if reference else 0.0)

    def measured(self, kind: str) -> float | None:
        """Typical seconds of a stage's last builds in the store, or None."""
        if self._store is None:
            return None
        return typical(e for e in self._store.entries(kind) if e.meta.get(METADATA) == self._parameters)

    def _stage(self, kind: str, cost: Timing) -> float:
        seen = self.measured(kind)
        return self._of(cost) if seen is None else seen

    def _of(self, cost: Timing) -> float:
        return cost.of(self._layers, self._parameters)


def typical(entries: Iterable[Entry]) -> float | None:
    """Median build time of the last of `entries`, or None."""
    timed = (float(entry.meta["seconds"]) for entry in entries if "seconds" in entry.meta)
    recent = list(islice(timed, RECENT))
    return median(recent) if recent else None


def of_target(store: Store, target: str) -> Iterable[Entry]:
    """A target's executables in the store."""
    return (entry for entry in store.entries("executable") if entry.key.components.get("target") == target)
