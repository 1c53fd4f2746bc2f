"""TPUs that are only described: `--device tpu:v5e-2x2` compiles for that slice on any host, with libtpu's compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from llmc.compiler.stages import version_of
from llmc.compiler.targets.base import TopologyForm
from llmc.compiler.targets.hosting import Hosting
from llmc.compiler.targets.xla.described import DescribedTarget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.compiler.targets.xla.topology import Topology
    from llmc.runtime.accelerators import Cards
    from llmc.runtime.executors.xla.client import Platform

GKE = {
    "v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}  # fmt: skip
"""Google Kubernetes Engine's names of the generations ("About TPUs in GKE", cloud.google.com/gke-tpu-accelerator)."""


class TpuTarget(DescribedTarget):
    """See the module's docstring."""

    name: ClassVar[str] = "tpu"
    platform: ClassVar[Platform] = "tpu"
    compile_needs: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors", "jax", "libtpu")
    compile_extras: ClassVar[tuple[str, ...]] = ("compile", "tpu")
    guide: ClassVar[str] = "docs/tpu.md"
    fresh_process: ClassVar[tuple[str, ...]] = (
        "llmc.compiler.targets.xla.build",
        "llmc.compiler.targets.xla.scan_layers",
        __name__,
    )
    rolls_by_default: ClassVar[bool] = True
    executable_seconds: ClassVar[float] = 4.0
    topology_form: ClassVar[TopologyForm | None] = TopologyForm(
        "GENERATION-SHAPE", "tpu:v5e-2x2", "generation", "shapes"
    )

    @classmethod
    def topologies(cls) -> list[dict[str, Any]]:
        """Every slice that libtpu can be asked for."""
        from llmc.compiler.targets.xla.topology import known, shown

        return [
            {
                "name": topology.name,
                "generation": topology.generation,
                "shape": shown(topology.shape),
                "chips": topology.chips,
                "devices": topology.devices,
                "hosts": topology.hosts,
                "hbm_bytes_per_device": topology.usable_bytes,
            }
            for topology in known()
        ]

    def cards(self) -> tuple[Cards, ...]:
        """TPU chips."""
        from llmc.runtime.accelerators import TPU

        return (TPU,)

    def lacks(self) -> str:
        """A TPU, on most hosts."""
        from llmc.runtime.executors.xla.client import has_tpu

        return "" if has_tpu() else "needs a TPU host"

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        """The slice, on nodes of Google Kubernetes Engine; raises InputError for one of several hosts."""
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
    def topology(self) -> Topology:
        """The slice that is compiled for; raises InputError listing the known ones."""
        from llmc.compiler.targets.xla.topology import parse_topology

        return parse_topology(self._detail)

    def toolchain(self) -> dict[str, str]:
        """JAX, and the compiler in libtpu with its flags."""
        arguments = self.settings.libtpu_arguments
        return {
            **super().toolchain(), "libtpu": version_of("libtpu", "tpu"),
            **({"LIBTPU_INIT_ARGS": arguments} if arguments else {}),
        }  # fmt: skip
