"""XLA for this host's CPU: `--device xla`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmc.compiler.targets.description import Hardware
from llmc.compiler.targets.hosting import Hosting
from llmc.compiler.targets.xla.target import TENSOR_PARALLEL, XLA, XlaTarget
from llmc.runtime.accelerators import CPU
from llmc.runtime.host import host_features

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.xla.build import Machine


class XlaCpuTarget(XlaTarget):
    """`--device xla`."""

    description = replace(
        XLA,
        name="xla",
        hardware=Hardware("x86-64 with AVX-512 (AMD EPYC)", "jax 0.10.2", "2026-11", "benchmarks/RESULTS.md"),
        guide="docs/xla.md",
        accelerators=(CPU,),
    )

    @property
    def costs(self) -> Costs:
        from llmc.compiler.targets.xla.costs import XlaCpuCosts

        return XlaCpuCosts()

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        return Hosting(extra="xla")

    def isa(self) -> tuple[str, ...]:
        return host_features()

    def machine(self, options: CompileOptions) -> Machine:
        """The CPU, as so many devices as graphs are sharded over. Raises DeviceError."""
        from llmc.compiler.targets.xla.build import host_machine

        return host_machine(TENSOR_PARALLEL.of(options), self.settings.threads)
