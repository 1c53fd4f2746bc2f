"""The CPUs that a bundle's kernels are for, and verification of kernels that this host cannot run.

Only the libraries' keys contain the kernel sources, so their builder is imported on use.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, KernelSet
from llmc.compiler.code import code_digest
from llmc.compiler.stages import Stages, toolchain
from llmc.compiler.targets.onnxruntime.options import BF16, CPU_OPTION, F16, kept_in
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.options import CompileOptions


def with_cpus(options: CompileOptions, named: str) -> CompileOptions:
    """Return `options` for the CPUs `named` behind the device's name; "" for none.

    Raises InputError where --cpu names others.
    """
    requested = CPU_OPTION.of(options)
    if not named or requested == named:
        return options
    if requested is not None:
        raise InputError(
            f"--device {options.device} and {CPU_OPTION.flag} {requested}: both name CPUs; give all of them "
            f"once, as {CPU_OPTION.flag} {named},{requested}"
        )
    return options.changed(**{CPU_OPTION.name: named})


def sets_of(options: CompileOptions, here: Collection[str]) -> tuple[KernelSet, ...]:
    """Return the kernel variants of the requested CPUs, fastest first; `here`: the features of this host."""
    from llmc.compiler.targets.onnxruntime.kernels.cpus import NATIVE, sets_for

    return sets_for(CPU_OPTION.of(options) or NATIVE, here)


def cache_default(sets: Collection[KernelSet], here: Collection[str]) -> str:
    """Return the default KV cache precision: bf16 where all of these variants and this host are fast with it.

    All variants then have the same results. `here`: the features of this host.
    """
    own = {one.own_bf16_sums for one in sets}
    verifiable = own == {False} or any(one.runs_on(here) for one in sets)
    return BF16 if len(own) == 1 and verifiable and all(one.fast_bf16_attention for one in sets) else F16


def verified_by(options: CompileOptions, here: Collection[str]) -> KernelSet | None:
    """Return the variant that verifies a bundle whose variants this host cannot run; None if it runs one.

    Variants with the same bits differ only in bfloat16 attention (docs/cpu.md). Raises InputError where this host runs
    no such variant.
    """
    wanted = sets_of(options, here)
    if any(one.runs_on(here) for one in wanted):
        return None
    rounded = kept_in(options) == BF16
    runs = [one for one in KERNEL_SETS if one.runs_on(here) and not (rounded and one.own_bf16_sums)]
    if not runs or (rounded and any(one.own_bf16_sums for one in wanted)):
        raise InputError(
            f"{CPU_OPTION.flag} {CPU_OPTION.of(options)}: this host cannot run kernels with the same results as "
            f"{', '.join(one.name for one in wanted)}, so nothing could be verified here; name native too, or use "
            "--verify none"
        )
    return runs[0]


def libraries(stages: Stages, sets: Collection[KernelSet]) -> Mapping[str, str]:
    """Build the operator library of each variant: its digest in the store by the name of the bundle's file."""
    return {kernels.file: _library(stages, kernels).digest for kernels in sets}


def _library(stages: Stages, kernels: KernelSet) -> Blob:
    from llmc.compiler.targets.onnxruntime.kernels.build import build as build_library

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        with tempfile.TemporaryDirectory(dir=workspace.folder) as folder:
            return {kernels.file: workspace.put_file(build_library(Path(folder), kernels.name))}

    components = {
        **toolchain("ziglang"), "set": kernels.name, "code": code_digest(build_library), "state": "native",
    }  # fmt: skip
    return stages.run("kernels", components, build).outputs[kernels.file]
