"""The target that a device stands for, for one model and plan. Estimates, plans and compiles all use this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.checkpoint import Checkpoint, open_checkpoint
from llmc.compiler.model_size import weights_of
from llmc.compiler.targets import open_target
from llmc.compiler.targets.declared import selecting_adapters
from llmc.compiler.targets.deployment import Deployment
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.buckets.plan import Plan
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Target
    from llmc.settings import Settings


@dataclass(frozen=True)
class CompileJob:
    """The inputs of a compile, determined once.

    The open checkpoint; the `opened` target of the device, and the target that the device stands for; the options that
    were `asked` for, and the same with the target's defaults (`options`); the reason for that target ("" if the device
    stands for itself), and the reason for defaults that the model `decided` ("" for none).
    """

    checkpoint: Checkpoint
    plan: Plan
    opened: Target
    target: Target
    asked: CompileOptions
    options: CompileOptions
    why: str
    decided: str

    @classmethod
    def of(
        cls, model: str | Checkpoint, plan: Plan, options: CompileOptions, settings: Settings | None = None,
        target: Target | None = None,
    ) -> CompileJob:  # fmt: skip
        """Open the checkpoint and the device's `target`, unless they are, and ask the target whether it takes all that.

        Raises CheckpointError, InputError and DeviceError, before anything is made.
        """
        checkpoint = open_checkpoint(model)
        weights = weights_of(checkpoint)
        deployment = Deployment(plan.limits, plan.provenance.facts, checkpoint.config, weights)
        opened = target or open_target(options.device, settings)
        target, asked, why = opened.resolve(options, deployment)
        settled, decided = target.settle(asked, weights)
        if checkpoint.choices and not target.selects_adapters:
            raise InputError(
                f"device {options.device} has no graphs whose rows choose an adapter, as those of "
                f"{', '.join(selecting_adapters())} have: leave --lora-modules out, and compile a bundle for each "
                "adapter (--lora merges it)"
            )
        target.require_supported(checkpoint.config)
        target.require_consumed(checkpoint)
        if not plan.limits.contexts and cache_of(checkpoint.config).kv:
            raise InputError(
                f"the plan is for a model that keeps states alone ('contexts' is false), and {checkpoint.name} reads "
                "cached tokens; plan for this model"
            )
        settled.require_vocabulary(checkpoint.name, int(checkpoint.config["vocab_size"]))
        return cls(checkpoint, plan, opened, target, asked, settled, why, decided)

    @property
    def because(self) -> str:
        """Why it is this target, as summaries have it."""
        return f"{self.target.executor}: {self.why}" if self.why else ""


def target_of(manifest: Manifest) -> Target:
    """The target that made a bundle: its device's, or the one that its device stood for."""
    target = open_target(manifest.device)
    return target if target.name == manifest.target else open_target(manifest.target)
