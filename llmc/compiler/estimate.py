"""What a compile would do, without doing it: which stages and executables are in the store, and rough time and size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmc.artifacts.key import Key
from llmc.compiler.footprint import Footprint, stage_seconds
from llmc.compiler.model_size import ModelSize, weights_of
from llmc.compiler.pipeline import executable_key
from llmc.compiler.stages import StageReport, Stages
from llmc.errors import CheckpointError, LlmcError

if TYPE_CHECKING:
    from llmc.artifacts.entries import Entry
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Target

VERIFY_SECONDS = 8.0
"""Seconds of verification where the store has none to learn from; SmolLM2-135M on two cores."""


class _NotBuiltError(LlmcError):
    pass


class _LookupStages(Stages):
    """Stages that are only looked up: the first one that is missing ends the walk."""

    def run(self, kind: str, components: Mapping[str, Any], build: object) -> Entry:
        key = Key(kind, components)
        entry = self.store.lookup(key)
        if entry is None:
            raise _NotBuiltError(f"stage {kind} has to run: {self.store.why(key)}")
        return entry


def estimate(target: Target, stages: Stages, options: CompileOptions) -> dict[str, Any]:
    """Shapes with `cached` (None when that depends on a stage still to run) and `why` not, seconds and bytes."""
    lookup = _LookupStages(stages.store, stages.checkpoint, stages.plan, _ignore)
    shapes = target.shapes(stages.plan.buckets, options)
    prepared = None
    why: list[str | None] = [None] * len(shapes)
    try:
        prepared = target.prepare(lookup, options)
        keys = [executable_key(target, prepared, shape, options) for shape in shapes]
        cached: list[bool | None] = [stages.store.lookup(key) is not None for key in keys]
        why = [None if hit else stages.store.why(key) for key, hit in zip(keys, cached, strict=True)]
    except _NotBuiltError as missing:
        cached = [None] * len(shapes)
        why = [str(missing)] * len(shapes)
    size = _size_of(stages)
    weights = weights_of(stages.checkpoint) or (size.weights if size else [])
    footprint = Footprint(size, target, options, stages.plan.limits, stages.store, weights=weights)
    to_build = sum(not c for c in cached)
    seconds = to_build * footprint.seconds_each
    if prepared is None:
        seconds += sum(stage_seconds(stages.store, kind) for kind in ("lower", "weights"))
    if options.verify != "none" and to_build:
        seconds += stage_seconds(stages.store, "reference") if prepared is None else 0.0
        seconds += VERIFY_SECONDS
    estimates = footprint.estimates(stages.plan.buckets)
    return {
        "device": options.device,
        "choice": target.choice(options),
        "executables": [
            {
                "phase": s.phase,
                "batch": s.batch,
                "query": s.query,
                "context": s.context,
                "buckets": s.buckets,
                "cached": c,
                "why": reason,
            }
            for s, c, reason in zip(shapes, cached, why, strict=True)
        ],
        "to_build": to_build,
        "cached": sum(bool(c) for c in cached),
        "estimated_seconds": round(seconds, 1),
        "estimated_bytes": footprint.weight_bytes + 150_000 * len(shapes),
        "estimates": [estimate.to_dict() for estimate in estimates],
    }


def _size_of(stages: Stages) -> ModelSize | None:
    """The model's sizes, or None for an architecture whose config names them otherwise."""
    try:
        return ModelSize.of(stages.checkpoint.config, stages.checkpoint.name)
    except CheckpointError:
        return None


def _ignore(_: StageReport) -> None:
    return None
