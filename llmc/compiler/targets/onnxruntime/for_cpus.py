"""The CPUs that the kernels of a bundle are for, and what verifies a bundle whose kernels this host does not run.

The kernels' sources are in the keys of their libraries alone: what builds them is imported where it is called."""

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
    """`options` for the CPUs that are `named` behind the device's name, "" for none.

    Raises InputError where --cpu names others.
    """
    requested = CPU_OPTION.of(options)
    if not named or requested == named:
        return options
    if requested is not None:
        raise InputError(
            f"--device {options.device} and {CPU_OPTION.flag} {requested}: both name CPUs; give all of them in one "
            f"place, as {CPU_OPTION.flag} {named},{requested}"
        )
    return options.changed(**{CPU_OPTION.name: named})


def sets_of(options: CompileOptions, here: Collection[str]) -> tuple[KernelSet, ...]:
    """The sets of kernels for the CPUs that are asked for, the fastest first; `here`: the features of this host."""
    from llmc.compiler.targets.onnxruntime.kernels.cpus import NATIVE, sets_for

    return sets_for(CPU_OPTION.of(options) or NATIVE, here)


def cache_default(sets: Collection[KernelSet], here: Collection[str]) -> str:
    """What keys and values are kept in by default: bf16 where that is fast with each of these sets, all have the same
    results so, and a host with the features `here` has them too."""
    own = {one.own_bf16_sums for one in sets}
    verifiable = own == {False} or any(one.runs_on(here) for one in sets)
    return BF16 if len(own) == 1 and verifiable and all(one.fast_bf16_attention for one in sets) else F16


def verified_by(options: CompileOptions, here: Collection[str]) -> KernelSet | None:
    """The set of kernels that verifies a bundle of which this host runs none, with the same bits; None: it runs one.

    Sets differ in attention in bfloat16 alone (docs/cpu.md). Raises InputError where this host runs no such set.
    """
    wanted = sets_of(options, here)
    if any(one.runs_on(here) for one in wanted):
        return None
    rounded = kept_in(options) == BF16
    runs = [one for one in KERNEL_SETS if one.runs_on(here) and not (rounded and one.own_bf16_sums)]
    if not runs or (rounded and any(one.own_bf16_sums for one in wanted)):
        raise InputError(
            f"{CPU_OPTION.flag} {CPU_OPTION.of(options)}: this host runs no kernels with the results of "
            f"{', '.join(one.name for one in wanted)}, so nothing could be verified here; name native too, or use "
            "--verify none"
        )
    return runs[0]


def libraries(stages: Stages, sets: Collection[KernelSet]) -> Mapping[str, str]:
    """Of each set the library of llmc's own operators: its digest in the store by the name of the bundle's file."""
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
