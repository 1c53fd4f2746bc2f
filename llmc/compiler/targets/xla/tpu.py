"""Described TPUs: `--device tpu:v5e-2x2` compiles for that slice on any host, with libtpu's compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.compiler.stages import version_of
from llmc.compiler.targets.description import TRACING, Topologies
from llmc.compiler.targets.hosting import Hosting
from llmc.compiler.targets.xla.described import COMPILING, DESCRIBED, DescribedTarget, listed
from llmc.runtime.accelerators import TPU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.xla.topology import TpuTopology
    from llmc.runtime.executors.xla.client import Platform

GKE = {
    "v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}  # fmt: skip
"""Google Kubernetes Engine's names of the generations ("About TPUs in GKE", cloud.google.com/gke-tpu-accelerator)."""


def _known() -> list[dict[str, Any]]:
    """Every slice that libtpu can describe."""
    from llmc.compiler.targets.xla.topology import known, shown

    return [listed(t, t.generation, shown(t.shape), t.chips, t.hosts) for t in known()]


class TpuTarget(DescribedTarget):
    """`--device tpu:TOPOLOGY`."""

    description = replace(
        DESCRIBED,
        name="tpu",
        fresh_process=(*COMPILING, __name__),
        requirements=replace(
            DESCRIBED.requirements, compiling=(*TRACING, "jax", "libtpu"), compile_extras=("compile", "tpu")
        ),
        topologies=Topologies("GENERATION-SHAPE", "tpu:v5e-2x2", "generation", "shapes", _known),
        guide="docs/xla.md",
        accelerators=(TPU,),
    )
    platform: ClassVar[Platform] = "tpu"
    rolls_by_default: ClassVar[bool] = True

    @property
    def costs(self) -> Costs:
        from llmc.compiler.targets.xla.costs import TpuCosts

        return TpuCosts(self.topology)

    def lacks(self) -> str:
        from llmc.runtime.executors.xla.client import has_tpu

        return "" if has_tpu() else "needs a TPU host"

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        """The slice, on nodes of Google Kubernetes Engine. Raises InputError for a slice of several hosts."""
        from llmc.compiler.targets.xla.topology import shown
        from llmc.errors import InputError

        slice_ = self.topology
        if slice_.hosts > 1:
            raise InputError(
                f"tpu:{slice_.name} is a slice of {slice_.hosts} hosts, and a server runs on one; compile for a slice "
                "of one host"
            )
        labels = {"accelerator": GKE[slice_.generation], "topology": shown(slice_.shape)}
        return Hosting(
            extra="tpu",
            resources={"google.com/tpu": slice_.chips},
            node_selector={f"cloud.google.com/gke-tpu-{name}": value for name, value in labels.items()},
            host_memory=False,
        )

    @property
    def topology(self) -> TpuTopology:
        from llmc.compiler.targets.xla.topology import parse_topology

        return parse_topology(self._detail)

    def toolchain(self) -> dict[str, str]:
        arguments = self.settings.libtpu_arguments
        return {
            **super().toolchain(), "libtpu": version_of("libtpu", "tpu"),
            **({"LIBTPU_INIT_ARGS": arguments} if arguments else {}),
        }  # fmt: skip
