"""The target that a device stands for, for one model and plan: whoever prices, plans or compiles asks here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.model_size import weights_of
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Deployment

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Target


def target_for(options: CompileOptions, plan: Plan, checkpoint: Checkpoint) -> tuple[Target, CompileOptions, str]:
    """`Target.resolve` for a plan and a checkpoint: the target, its options, and why it is that one."""
    parameters = sum(weights.count for weights in weights_of(checkpoint))
    deployment = Deployment(plan.limits, plan.provenance.facts, checkpoint.config, parameters)
    return open_target(options.device).resolve(options, deployment)


def target_of(manifest: Manifest) -> Target:
    """The target that made a bundle: its device's, or the one that its device stood for."""
    target = open_target(manifest.device)
    return target if target.name == manifest.target else open_target(manifest.target)
