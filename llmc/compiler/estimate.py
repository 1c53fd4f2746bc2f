"""What a compile would do, without doing it: which stages and executables are in the store, and rough time and size."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from llmc.artifacts.key import Key
from llmc.compiler.pipeline import executable_key
from llmc.compiler.stages import StageReport, Stages
from llmc.errors import LlmcError

if TYPE_CHECKING:
    from llmc.artifacts.entries import Entry
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Target

DEFAULT_SECONDS = {"lower": 12.0, "weights": 4.0, "pack": 3.0, "reference": 20.0, "verify": 4.0}
"""Seconds a stage takes where the store has no build to learn from; SmolLM2-135M on two cores."""
_BITS = {"int8": 9, "f32": 32, "bf16": 16, "f16": 16}


class _NotBuiltError(LlmcError):
    pass


class _LookupStages(Stages):
    """Stages that are only looked up: the first one that is missing ends the walk."""

    missing: str = ""

    def run(self, kind: str, components: Mapping[str, Any], build: object) -> Entry:
        entry = self.store.lookup(Key(kind, components))
        if entry is None:
            self.missing = kind
            raise _NotBuiltError(kind)
        return entry


def estimate(target: Target, stages: Stages, options: CompileOptions) -> dict[str, Any]:
    """Shapes with `cached` (None when that depends on a stage still to run), seconds and bytes."""
    lookup = _LookupStages(stages.store, stages.checkpoint, stages.plan, _ignore)
    shapes = target.shapes(stages.plan.buckets, options)
    prepared = None
    try:
        prepared = target.prepare(lookup, options)
        cached: list[bool | None] = [
            stages.store.lookup(executable_key(target, prepared, shape, options)) is not None for shape in shapes
        ]
    except _NotBuiltError:
        cached = [None] * len(shapes)
    to_build = sum(not c for c in cached)
    seconds = to_build * _typical(stages, "executable", 1.0) / max(1, options.jobs)
    if prepared is None:
        seconds += sum(_typical(stages, kind, DEFAULT_SECONDS[kind]) for kind in ("lower", "weights"))
    if options.verify != "none" and to_build:
        seconds += _typical(stages, "reference", DEFAULT_SECONDS["reference"]) if prepared is None else 0.0
        seconds += DEFAULT_SECONDS["verify"] * 2
    weights = sum(_size(stages.checkpoint.shape(n)) for n in stages.checkpoint.tensor_names())
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
            }
            for s, c in zip(shapes, cached, strict=True)
        ],
        "to_build": to_build,
        "cached": sum(bool(c) for c in cached),
        "estimated_seconds": round(seconds, 1),
        "estimated_bytes": weights * _BITS[options.dtype if options.quantize == "none" else str(options.quantize)] // 8
        + 150_000 * len(shapes),
    }


def _typical(stages: Stages, kind: str, default: float) -> float:
    seconds = [e.meta["seconds"] for e in stages.store.entries(kind)[:32] if "seconds" in e.meta]
    return float(median(seconds)) if seconds else default


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for d in shape:
        size *= d
    return size


def _ignore(_: StageReport) -> None:
    return None
