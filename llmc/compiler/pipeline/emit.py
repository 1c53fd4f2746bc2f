"""A compile stopped early: its programs, traced or lowered, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmc.compiler.pipeline.compile import Reporter, lowered
from llmc.compiler.pipeline.resolve import Job
from llmc.compiler.stages import Stages
from llmc.compiler.targets.encoder import EncoderCase, open_encoder_target
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.buckets.encoding import EncodePlan
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions

PHASES = ("program", "lowered")


def emit(
    model: str | Checkpoint, plan: Plan, options: CompileOptions, store: Store, phase: str, report: Reporter
) -> Iterator[tuple[str, str]]:
    """Programs of `phase` with their names: traced, or in the form that the device's compiler takes.

    Traced programs have symbolic sizes; a device that lowers bucket by bucket gives one of each shape of the plan. What
    was made is in the store, for a compile. Raises as `compile_bundle`, and InputError for an unknown phase.
    """
    _require_known(phase)
    job = Job.of(model, plan, options)
    stages = Stages(store, job.checkpoint, plan, report, job.target.settings)
    if phase == "program":
        for program in job.target.trace(stages, job.options):
            yield program.name, program.text()
        return
    made, options, _ = lowered(stages, job.target, job.asked, job.options)
    yield from job.target.show(made, job.target.shapes(plan.buckets, options), options)


def emit_encoder(
    checkpoint: Checkpoint, plan: EncodePlan, options: CompileOptions, store: Store, phase: str, report: Reporter
) -> Iterator[tuple[str, str]]:
    """The same of a model that embeds or scores. Raises as `compile_encoder`, and InputError for an unknown phase."""
    _require_known(phase)
    target, _ = open_encoder_target(options.device)
    options = target.configure(options)
    target.toolchain()
    case = EncoderCase.of(checkpoint, plan.task)  # type: ignore[arg-type] # what a plan to encode has
    stages = Stages(store, checkpoint, plan, report)
    if phase == "program":
        yield from target.traced(stages, case, options)
    else:
        yield from target.lowered(stages, plan, case, options)


def _require_known(phase: str) -> None:
    if phase not in PHASES:
        raise InputError(f"--emit {phase!r}: there is {', '.join(PHASES)} and key")
