"""Plans of models that embed or score, from the flags of commands that plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from llmc.buckets.encoding import EncodePlan
    from llmc.cli.planning import PlanningFlags
    from llmc.compiler.checkpoint import Checkpoint


_TRAFFIC = ("traffic", "traffic_format", "fields", "max_graphs")


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
    from llmc.compiler.checkpoint import open_checkpoint
    from llmc.compiler.pipeline.encoding import LIMITS, encoder_plan_of, plan_encoder, settled_task
    from llmc.files import read_text

    checkpoint = open_checkpoint(model)
    pooled = settled_task(checkpoint, task)
    if pooled is None:
        return None
    taken = {*LIMITS, *(_TRAFFIC if flags.traffic else ())}
    others = [flag for flag in flags.given() if flag.lstrip("-").replace("-", "_") not in taken]
    if others:
        raise InputError(
            f"a model to {pooled} is planned by its limits, and by --traffic with --max-graphs; leave out "
            f"{', '.join(others)}"
        )
    given = {name: getattr(flags, name) for name in LIMITS}
    if plan is None and flags.traffic is not None:
        return checkpoint, plan_encoder(checkpoint, pooled, **given, **_recorded(flags))
    made = None if plan is None else EncodePlan.from_json(read_text(plan, "plan"), str(plan))
    return checkpoint, encoder_plan_of(checkpoint, pooled, made, given)


def _recorded(flags: PlanningFlags) -> dict[str, Any]:
    """Texts by tokens, of the file that --traffic names, and what is planned by them."""
    from llmc.buckets.traffic.formats.fields import parse
    from llmc.buckets.traffic.reader import Trace

    assert flags.traffic is not None
    fields = None if flags.fields is None else parse(flags.fields)
    trace = Trace(flags.traffic, format=flags.traffic_format, fields=fields, generates=False)
    texts = Counter(request.prompt for request in trace)
    return {"texts": texts, "max_graphs": flags.max_graphs, "facts": {"traffic_sha256": trace.digest()}}
