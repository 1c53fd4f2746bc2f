"""A dry run of a compile for a model that embeds or scores: what is in the store, and what the rest takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmc.compiler.estimates.durations import typical
from llmc.compiler.model_size import weights_of
from llmc.compiler.pipeline.encoding import EXECUTABLE
from llmc.compiler.pipeline.lookup import LookupStages, NotBuiltError, ignore
from llmc.compiler.stages import Stages
from llmc.compiler.targets.encoder import EncoderCase, open_encoder_target

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.buckets.encoding import EncodePlan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions

_BYTES = {"none": 4, "int8": 1}
"""Of a weight in a bundle, by quantisation."""


class _Walk(LookupStages):
    """Goes on behind executables that are missing: `why`, of each that a bucket has."""

    def __init__(self, stages: Stages) -> None:
        super().__init__(stages)
        self.why: list[str | None] = []

    def run(self, kind: str, components: Mapping[str, Any], build: object) -> Entry:
        try:
            entry = super().run(kind, components, build)
        except NotBuiltError as missing:
            if kind != EXECUTABLE:
                raise
            self.why.append(str(missing))
            return None  # type: ignore[return-value] # nothing is made of an executable but the bundle
        self.why += [None] if kind == EXECUTABLE else []
        return entry


def dry_run_encoder(checkpoint: Checkpoint, plan: EncodePlan, options: CompileOptions, store: Store) -> dict[str, Any]:
    """As `pipeline.dry_run.dry_run` of models that generate; seconds are those of the store's last builds.

    Raises as `compile_encoder` does; builds nothing.
    """
    target, chosen = open_encoder_target(options.device)
    options = target.configure(options)
    target.toolchain()
    case = EncoderCase.of(checkpoint, plan.task)  # type: ignore[arg-type]
    walk = _Walk(Stages(store, checkpoint, plan, ignore))
    shapes = [(b.batch, b.query) for b in plan.buckets] if options.specialise else [None]
    why: list[str | None]
    try:
        target.make(walk, plan, case, replace(options, jobs=1))  # one after the other, as they are listed
        why = walk.why or [None]
    except NotBuiltError as missing:
        why = [str(missing)] * len(shapes)
    executables = [
        {
            "phase": "encode" if shape else "any", "batch": shape and shape[0], "query": shape and shape[1],
            "context": 0 if shape else None, "buckets": 1 if shape else len(plan.buckets), "cached": reason is None,
            "why": reason,
        }
        for shape, reason in zip(shapes, why, strict=True)
    ]  # fmt: skip
    to_build = sum(reason is not None for reason in why)
    return {
        "device": options.device, "choice": "; ".join(filter(None, (target.choice(options), chosen))),
        "executables": executables, "to_build": to_build, "cached": len(why) - to_build,
        "estimated_seconds": _seconds(store, walk, to_build),
        "estimated_bytes": sum(w.count for w in weights_of(checkpoint)) * _BYTES[str(options.quantize)],
        "warnings": [], "estimates": [],
    }  # fmt: skip


def _seconds(store: Store, walk: _Walk, to_build: int) -> float | None:
    """Of what is missing, verification not counted; None where no such build was measured."""
    if not to_build:
        return 0.0
    shared = 0.0 if walk.why else typical(store.entries("encoder"))
    each = typical(store.entries(EXECUTABLE))
    return None if shared is None else round(shared + to_build * (each or 0.0), 1)
