"""A checkpoint for two devices: one that computes prompts, one that decodes, from one plan, into one folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.bundle.hybrid import Halves
from llmc.buckets.hybrid.halves import half
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.pipeline.finish import compile_and_finish
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import VendorPrefill
from llmc.compiler.targets.declared import declared
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.compile import CompileResult, Reporter
    from llmc.settings import Settings


@dataclass(frozen=True)
class HybridResult:
    """What was compiled, by role: "prefill" and "decode"; or "decode" alone where that device has prompts computed on
    the other one by itself, once `variables` are set where it runs."""

    folder: Path
    halves: Mapping[str, CompileResult]
    variables: Mapping[str, str]


def compile_hybrid(
    model: str | Checkpoint, folder: Path, plan: Plan, prefill: str, options: CompileOptions, store: Store,
    report: Reporter, settings: Settings,
) -> HybridResult:  # fmt: skip
    """Compile `model` with `options`, whose device decodes, and for the device `prefill`, into `folder`.

    Each half has all buckets of its phase, and one that serves the other phase alone (buckets/hybrid/halves.py).
    Options that targets declare go to the halves whose device declares them. Raises what `compile_bundle`
    raises, and InputError for an option that neither takes.
    """
    checkpoint = open_checkpoint(model) if isinstance(model, str) else model
    if checkpoint.choices:
        raise InputError(
            f"{checkpoint.name} has adapters that requests choose, and prompts with one are not handed from device to "
            "device: compile for one device, or merge an adapter (--lora)"
        )
    decoding = open_target(options.device, settings)
    variables = decoding.prefills_on(prefill) if isinstance(decoding, VendorPrefill) else None
    if variables is not None:
        alone = compile_and_finish(checkpoint, folder, plan, options, store, report, settings)
        return HybridResult(folder, {"decode": alone}, variables)
    chosen = {"prefill": _for(prefill, options), "decode": _for(options.device, options)}
    for name in options.own:
        if not any(name in one.own for one in chosen.values()):
            raise InputError(f"{declared()[name].option.flag} is not offered for {prefill} and {options.device}")
    halves = Halves.of(folder)
    made = {}
    for role, place, phase in (("prefill", halves.prefill, "prompt"), ("decode", halves.decode, "decode")):
        part = half(plan, "prompt" if phase == "prompt" else "decode")
        made[role] = compile_and_finish(checkpoint, place, part, chosen[role], store, report, settings)
    halves.write()
    return HybridResult(folder, made, {})


def _for(device: str, options: CompileOptions) -> CompileOptions:
    known, name = declared(), device.partition(":")[0]
    own = {option: value for option, value in options.own.items() if name in known[option].devices}
    return replace(options, device=device, own=own)
