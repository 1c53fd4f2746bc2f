"""Plans of models that embed or score, from the flags of commands that plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from llmc.buckets.encoding import EncodePlan
    from llmc.cli.planning import PlanningFlags
    from llmc.compiler.checkpoint import Checkpoint


def pooled_plan(model: str, task: str | None, flags: PlanningFlags) -> EncodePlan | None:
    """The plan of a checkpoint that embeds or scores; None for one that generates, or has no weights."""
    try:
        found = pooled_plan_of(model, task, flags)
    except CheckpointError:
        if task is not None:
            raise
        return None
    return None if found is None else found[1]


def pooled_plan_of(
    model: str, task: str | None, flags: PlanningFlags, plan: Path | None = None
) -> tuple[Checkpoint, EncodePlan] | None:
    """What is compiled and its plan, where it embeds or scores; None for a model that generates."""
    from llmc.buckets.encoding import EncodePlan
    from llmc.buckets.files import read_text
    from llmc.compiler.checkpoint import open_checkpoint
    from llmc.compiler.pipeline.encoding import LIMITS, encoder_plan_of, settled_task

    checkpoint = open_checkpoint(model)
    pooled = settled_task(checkpoint, task)
    if pooled is None:
        return None
    given = {name: getattr(flags, name) for name in LIMITS}
    others = [flag for flag in flags.given() if flag.lstrip("-").replace("-", "_") not in LIMITS]
    if others:
        raise InputError(f"a model to {pooled} is planned by its limits alone; leave out {', '.join(others)}")
    made = None if plan is None else EncodePlan.from_json(read_text(plan, "plan"), str(plan))
    return checkpoint, encoder_plan_of(checkpoint, pooled, made, given)
