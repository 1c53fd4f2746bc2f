"""Resolve a device to its target for one model and plan; estimates, plans and compiles all use this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.checkpoint import Checkpoint, open_checkpoint
from llmc.compiler.model_size import weights_of
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target, selecting_adapters
from llmc.compiler.targets.base import Deployment, Target
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.buckets.plan import Plan
    from llmc.settings import Settings


@dataclass(frozen=True)
class CompileJob:
    """The inputs of a compile, determined once.

    `opened` is the device's target, and `target` the one that the device resolves to. `options` are those `requested`,
    with the target's defaults. `why` is the reason for the target, and `decided` the reason for defaults that the model
    determines, each "" for none. `starter` serves until the target's executables are open.
    """

    checkpoint: Checkpoint
    plan: Plan
    opened: Target
    target: Target
    requested: CompileOptions
    options: CompileOptions
    why: str
    decided: str
    starter: tuple[Target, CompileOptions] | None = None

    @classmethod
    def of(
        cls, model: str | Checkpoint, plan: Plan, options: CompileOptions, settings: Settings | None = None,
        target: Target | None = None,
    ) -> CompileJob:  # fmt: skip
        """Open the checkpoint and the device's `target`, unless they are open, and check that the target takes them.

        Raises CheckpointError, InputError and DeviceError, before anything is built.
        """
        checkpoint = open_checkpoint(model)
        deployment = Deployment(plan.limits, plan.provenance.facts, checkpoint.config, weights_of(checkpoint))
        opened = target or open_target(options.device, settings)
        found = opened.resolve(options, deployment)
        device = found.target.description
        if checkpoint.choices and not device.selects_adapters:
            raise InputError(
                f"device {options.device} has no graphs with selectable adapters; devices that do: "
                f"{', '.join(selecting_adapters())}. Leave --lora-modules out, and compile a bundle for each adapter "
                "(--lora merges it)"
            )
        device.reference.require_readable(checkpoint)
        if not plan.limits.contexts and cache_of(checkpoint.config).kv:
            raise InputError(
                f"the plan is for a purely recurrent model ('contexts' is false), and {checkpoint.name} reads cached "
                "tokens; plan for this model"
            )
        found.options.require_vocabulary(checkpoint.name, int(checkpoint.config["vocab_size"]))
        return cls(
            checkpoint, plan, opened, found.target, found.requested, found.options, found.why, found.decided,
            found.starter,
        )  # fmt: skip

    @property
    def because(self) -> str:
        """Reason for this target, for summaries."""
        return f"{self.target.description.executor}: {self.why}" if self.why else ""


def target_of(manifest: Manifest) -> Target:
    """The target that built a bundle: its device's, or the one that its device resolved to."""
    target = open_target(manifest.device)
    return target if target.description.name == manifest.target else open_target(manifest.target)


def recorded_options(manifest: Manifest, target: Target) -> CompileOptions:
    """Options that a bundle of `target` was compiled with, after `configure`.

    A device that specialises on its own decides that again: an LPU's host may have HyperDex or not.
    """
    device = target.description
    names = {"quantize", "dtype", "sample_top_k", *(option.name for option in device.options)}
    names |= set() if device.why_static else {"specialise"}
    given = {name: value for name, value in manifest.options.items() if name in names}
    return target.configure(CompileOptions.of(manifest.device, **given))
