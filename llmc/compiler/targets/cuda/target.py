"""NVIDIA GPUs that are only described: `--device cuda:h100` compiles for that card on any host, with XLA:GPU.

The compiler is in JAX's plug-in for CUDA, the assembler in nvidia-cuda-nvcc; neither asks for a card or a driver.

Layers are not rolled by default: XLA:GPU copies each layer's weights out of the stacked array in every turn of the loop
(seen in its HLO, jax 0.10.2), which triples what a decode step moves. Unrolled, products read them where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.compiler.targets.base import TopologyForm
from llmc.compiler.targets.cuda.attention import ATTENTION, DIALECTS
from llmc.compiler.targets.xla.described import DescribedTarget
from llmc.compiler.targets.xla.target import LOWERING, ROLL_LAYERS
from llmc.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.compiler.options import CompileOptions, Option
    from llmc.compiler.program.program import Program
    from llmc.compiler.program.stage import WeightlessDialect
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Lowered
    from llmc.compiler.targets.cuda.topology import Topology
    from llmc.runtime.accelerators import Cards
    from llmc.runtime.executors.xla.client import Platform

COMPILER_OPTIONS: Mapping[str, str | int | bool] = {"xla_gpu_autotune_level": 0}
"""Autotuning runs candidates on the card, which is not here: products come from XLA's Triton emitter, by its cost
model."""


class CudaTarget(DescribedTarget):
    """See the module's docstring."""

    name: ClassVar[str] = "cuda"
    executor: ClassVar[str] = "xla-cuda"
    platform: ClassVar[Platform] = "cuda"
    options: ClassVar[tuple[Option[Any], ...]] = (*DescribedTarget.options, ATTENTION)
    compile_needs: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors", "jax", "jax_cuda13_plugin")
    install: ClassVar[str] = "pip install 'llmc[compile,cuda]'"
    guide: ClassVar[str] = "docs/cuda.md"
    fresh_process: ClassVar[tuple[str, ...]] = (
        "llmc.compiler.targets.xla.build",
        "llmc.compiler.targets.xla.scan_layers",
        __name__,
    )
    executable_seconds: ClassVar[float] = 8.0
    executable_bytes: ClassVar[int] = 1_400_000
    topology_form: ClassVar[TopologyForm | None] = TopologyForm(
        "CARD[-COUNT]", "cuda:h100-8", "card", "cards of one host"
    )

    @classmethod
    def topologies(cls) -> list[dict[str, Any]]:
        """Every card, alone and with others in one host."""
        from llmc.compiler.targets.cuda.topology import known

        return [
            {
                "name": topology.name,
                "generation": topology.card.name,
                "shape": str(topology.count),
                "chips": topology.count,
                "devices": topology.devices,
                "hosts": 1,
                "hbm_bytes_per_device": topology.usable_bytes,
            }
            for topology in known()
        ]

    def cards(self) -> tuple[Cards, ...]:
        """NVIDIA's."""
        from llmc.runtime.accelerators import NVIDIA_GPU

        return (NVIDIA_GPU,)

    def lacks(self) -> str:
        """A card, on most hosts that compile."""
        from llmc.runtime.accelerators import NVIDIA_GPU

        return "" if NVIDIA_GPU.found() else "needs a host with an NVIDIA GPU"

    @property
    def topology(self) -> Topology:
        """The cards that are compiled for; raises InputError listing the known ones."""
        from llmc.compiler.targets.cuda.topology import parse_topology

        return parse_topology(self._detail)

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Refuses a kernel in what torch-xla lowers."""
        if LOWERING.of(options) != "jax" and ATTENTION.of(options) != "plain":
            raise InputError(f"{ATTENTION.flag} pallas works with --lowering jax; leave one of them out")
        return super().configure(options)

    def _rolls(self, programs: Sequence[Program], options: CompileOptions) -> bool:
        """By default only plain attention is rolled: XLA:GPU copies a layer's weights out of their stack before it uses
        them, and without rolling keeps the masked caches of all layers at once, which the kernel has none of."""
        if ROLL_LAYERS.of(options) is None and ATTENTION.of(options) != "plain":
            return False
        return super()._rolls(programs, options)

    def dialect(self, options: CompileOptions) -> WeightlessDialect:
        """Attention as one operator for the kernel."""
        return DIALECTS[ATTENTION.of(options)]

    def _native(self, step: Callable[..., Any], options: CompileOptions) -> Callable[..., Any] | None:
        """With the kernel, where it is asked for."""
        if ATTENTION.of(options) == "plain":
            return None
        from llmc.compiler.targets.xla.attention.attend import with_kernel

        return with_kernel(step)

    def compiler_options(self, options: CompileOptions) -> dict[str, str | int | bool]:
        """No autotuning."""
        return dict(COMPILER_OPTIONS)

    def lacks_format(self, flag: str, name: str) -> str:
        """As the card's compute capability has it."""
        from llmc.compiler.targets.cuda.formats import lacks_format

        return lacks_format(self.topology.card, flag, name)

    def toolchain(self) -> dict[str, str]:
        """JAX, XLA's plug-in and ptxas."""
        from llmc.compiler.targets.cuda.toolkit import versions

        return {**super().toolchain(), **versions()}

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """And the card, for the host that opens the bundle: its product, and the compute capability that the machine
        code is for ("9.0")."""
        card = self.topology.card
        about = {"name": card.name, "product": card.product, "compute_capability": card.capability}
        return {"card": about, **super().analyse(stages, lowered, files, options)}
