"""Compile a checkpoint for disaggregated prefill and decode on two devices, from one plan into one folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.bundle.disaggregated import Halves
from llmc.buckets.disaggregated.halves import half
from llmc.buckets.plan import Plan
from llmc.compiler.pipeline.compilation import Compilation
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import VendorPrefill
from llmc.compiler.targets.declared import declared
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.compile import CompileResult, Reporter


@dataclass(frozen=True)
class DisaggregatedResult:
    """Compile results by role: "prefill" and "decode", or only "decode".

    The latter means that the decode device runs prefill on the other device itself, once `variables` are set where it
    runs.
    """

    folder: Path
    halves: Mapping[str, CompileResult]
    variables: Mapping[str, str]


def compile_disaggregated(requested: Compilation, folder: Path, prefill: str, report: Reporter) -> DisaggregatedResult:
    """Compile a request for its device, which decodes, and for the device `prefill`, into `folder`.

    Each half has all buckets of its phase, and one that only serves the other phase (buckets/disaggregated/halves.py).
    Options that targets declare go to the halves whose device declares them. Raises the errors of
    `Compilation.compile`, and InputError for an option that neither device takes.
    """
    checkpoint, plan, options = requested.checkpoint, requested.plan, requested.options
    assert isinstance(plan, Plan)
    if checkpoint.choices:
        raise InputError(
            f"{checkpoint.name} has selectable adapters, whose prompts cannot be transferred between devices: compile "
            "for one device, or merge an adapter (--lora)"
        )
    target = requested.target or open_target(options.device, requested.settings)
    variables = target.prefills_on(prefill) if isinstance(target, VendorPrefill) else None
    if variables is not None:
        return DisaggregatedResult(folder, {"decode": requested.compile(folder, report)}, variables)
    chosen = {"prefill": _for(prefill, options), "decode": _for(options.device, options)}
    for name in options.own:
        if not any(name in one.own for one in chosen.values()):
            raise InputError(f"{declared()[name].option.flag} is not offered for {prefill} and {options.device}")
    halves = Halves.of(folder)
    built = {}
    for role, location, phase in (("prefill", halves.prefill, "prompt"), ("decode", halves.decode, "decode")):
        part = half(plan, "prompt" if phase == "prompt" else "decode")
        opened = target if role == "decode" else None
        each = Compilation(checkpoint, part, chosen[role], requested.store, requested.settings, opened)
        built[role] = each.compile(location, report)
    halves.write()
    return DisaggregatedResult(folder, built, {})


def _for(device: str, options: CompileOptions) -> CompileOptions:
    known, name = declared(), device.partition(":")[0]
    own = {option: value for option, value in options.own.items() if name in known[option].devices}
    return replace(options, device=device, own=own)
