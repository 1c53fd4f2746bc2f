"""Dry run of a compile: which stages and executables are in the store, and rough estimates of time and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmc.artifacts.key import Key
from llmc.compiler.architectures.shared.architectures import size_of
from llmc.compiler.estimates.footprint import Footprint
from llmc.compiler.model_size import weights_in
from llmc.compiler.pipeline.bind import why_unverified
from llmc.compiler.pipeline.compile import require_native
from llmc.compiler.pipeline.executors.base import executable_key
from llmc.compiler.pipeline.verification import probes_stage
from llmc.compiler.stages import StageReport, Stages
from llmc.errors import CheckpointError, LlmcError

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.compiler.architectures.shared.size import ModelSize
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.resolve import CompileJob
    from llmc.compiler.targets.base import Target


class NotBuiltError(LlmcError):
    """A stage is not in the store and has to run."""


class LookupStages(Stages):
    """Stages that are only looked up, never run.

    The first missing one ends the walk (NotBuiltError); `found` are those before it.
    """

    def __init__(self, stages: Stages) -> None:
        super().__init__(stages.store, stages.checkpoint, stages.plan, ignore)
        self.found: set[str] = set()

    def run(self, kind: str, components: Mapping[str, Any], build: object) -> Entry:
        """Look up the stage's entry in the store."""
        key = Key(kind, components)
        entry = self.store.lookup(key)
        if entry is None:
            raise NotBuiltError(f"stage {kind} has to run: {self.store.why(key)}")
        self.found.add(kind)
        return entry


def ignore(_: StageReport) -> None:
    """Ignore a report."""


def dry_run(job: CompileJob, store: Store) -> dict[str, Any]:
    """Describe what a compile would do: shapes with whether they are cached, and estimates of time (s) and size
    (bytes).

    Times come from the last builds of the same kind in the store, where there are any. Builds nothing.
    """
    require_native(job.target, job.options)
    why_unverified(job.target, job.checkpoint, job.options)
    stages = Stages(store, job.checkpoint, job.plan, ignore, job.target.settings)
    found = _estimate(job.target, stages, job.options)
    return found | {"choice": "; ".join(filter(None, (found["choice"], job.because, job.decided)))}


def _estimate(target: Target, stages: Stages, options: CompileOptions) -> dict[str, Any]:
    """Shapes with `cached` (None when a stage still to run decides it) and `why` not, seconds and bytes."""
    lookup = LookupStages(stages)
    shapes = target.shapes(stages.plan.buckets, options)
    known = None
    why: list[str | None] = [None] * len(shapes)
    try:
        known = target.lower(lookup, target.trace(lookup, options), options)
        keys = [executable_key(target, known, shape, options) for shape in shapes]
        cached: list[bool | None] = [stages.store.lookup(key) is not None for key in keys]
        why = [None if hit else stages.store.why(key) for key, hit in zip(keys, cached, strict=True)]
    except NotBuiltError as missing:
        cached = [None] * len(shapes)
        why = [str(missing)] * len(shapes)
    size = _size_of(stages)
    footprint = Footprint(
        size, target, options, stages.plan.limits, stages.store, weights=weights_in(stages.checkpoint)
    )
    to_build, buckets = sum(not c for c in cached), stages.plan.buckets
    seconds = to_build * footprint.seconds_each
    if known is None:
        seconds += sum(footprint.durations.stages(buckets, lookup.found).values())
    if to_build:
        seconds += footprint.verification_seconds(buckets, _reference_missing(lookup, target))
    estimates = footprint.estimates(stages.plan.buckets)
    return {
        "device": options.device,
        "choice": target.fixes(options).why,
        "executables": [
            asdict(s) | {"cached": c, "why": reason} for s, c, reason in zip(shapes, cached, why, strict=True)
        ],
        "to_build": to_build,
        "cached": sum(bool(c) for c in cached),
        "estimated_seconds": round(seconds, 1),
        "estimated_bytes": footprint.bundle_bytes(buckets),
        "warnings": footprint.warnings(buckets),
        "estimates": [estimate.to_dict() for estimate in estimates],
    }


def _reference_missing(lookup: LookupStages, target: Target) -> bool:
    try:
        probes_stage(lookup, target)
    except NotBuiltError:
        return True
    return False


def _size_of(stages: Stages) -> ModelSize | None:
    """The model's sizes, or None for an architecture whose config has other keys for them."""
    try:
        return size_of(stages.checkpoint.config, stages.checkpoint.name)
    except CheckpointError:
        return None
