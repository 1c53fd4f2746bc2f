"""Described NVIDIA GPUs: `--device cuda:h100` compiles for that GPU on any host, with XLA:GPU.

The compiler is in JAX's CUDA plug-in, the assembler in nvidia-cuda-nvcc; neither needs a GPU or a driver.

Layers are not rolled by default: XLA:GPU copies each layer's weights out of the stacked array in every loop iteration
(observed in its HLO, jax 0.10.2), which triples their memory traffic. Unrolled matmuls read weights in place. The price
is memory: plain attention then keeps a copy of the bucket's keys and values for all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.compiler.options import CompileOptions, Option
from llmc.compiler.targets.base import CompiledExecutable
from llmc.compiler.targets.cuda.tuning import NONE, TUNING, Tuning
from llmc.compiler.targets.description import TRACING, Topologies
from llmc.compiler.targets.hosting import Hosting, nvidia
from llmc.compiler.targets.xla.described import COMPILING, DESCRIBED, DescribedTarget, listed
from llmc.compiler.targets.xla.formats import KV_CACHE_DTYPE
from llmc.compiler.targets.xla.target import LOWERING, ROLL_LAYERS
from llmc.errors import InputError
from llmc.runtime.nvidia import NvidiaGpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.compiler.program.program import Program
    from llmc.compiler.program.stage import WeightlessDialect
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Lowered, Shape
    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.cuda.gpus import GpuSpec
    from llmc.compiler.targets.cuda.topology import GpuTopology
    from llmc.compiler.targets.tuning import Tuner
    from llmc.compiler.targets.xla.build import Machine
    from llmc.runtime.executors.xla.client import Platform

ATTENTION: Option[str] = Option(
    "attention", str, "plain",
    "Attention of steps: plain operators, which XLA fuses, or a kernel that reads a row's live tokens where they lie "
    "(Pallas for Triton; compiled here, never run on a GPU yet).",
    metavar="plain|pallas", choices=("plain", "pallas"),
)  # fmt: skip

DIALECTS: dict[str, WeightlessDialect] = {"plain": "two_part", "pallas": "read_only"}
"""The dialect in which a model is traced, by attention (frontend/attention.py)."""

FP8_FROM = (8, 9)
"""The least compute capability for which Triton converts float8 e4m3.

Below it, XLA of jax 0.10.2 aborts the process: "Conversion from/to f8e4m3nv is only supported on compute capability >=
89".
"""


def require_kernel(options: CompileOptions, gpu: GpuSpec) -> None:
    """Raise InputError where the attention kernel is requested and cannot be used."""
    if ATTENTION.of(options) == "plain":
        return
    if LOWERING.of(options) != "jax":
        raise InputError(f"{ATTENTION.flag} pallas works with --lowering jax; leave one of them out")
    if KV_CACHE_DTYPE.of(options) == "fp8" and gpu.compute_capability < FP8_FROM:
        raise InputError(
            f"{ATTENTION.flag} pallas with {KV_CACHE_DTYPE.flag} fp8 needs compute capability 8.9, {gpu.name} has "
            f"{gpu.capability}; leave one of them out"
        )


COMPILER_OPTIONS: Mapping[str, str | int | bool] = {"xla_gpu_autotune_level": 0}
"""Autotuning is off: it runs candidates on the GPU, which is absent. See matmuls.py for the alternative."""


def _known() -> list[dict[str, Any]]:
    """Every GPU, alone and with others in one host."""
    from llmc.compiler.targets.cuda.topology import known

    return [listed(t, t.gpu.name, str(t.count), t.count, hosts=1) for t in known()]


class CudaTarget(DescribedTarget):
    """`--device cuda:GPU[-COUNT]`."""

    description = replace(
        DESCRIBED,
        name="cuda",
        executor="xla-cuda",
        also_called=("gpu", "nvidia"),
        options=(*DESCRIBED.options, ATTENTION, TUNING),
        fresh_process=(*COMPILING, __name__),
        requirements=replace(
            DESCRIBED.requirements,
            compiling=(*TRACING, "jax", "jax_cuda13_plugin"),
            compile_extras=("compile", "cuda"),
        ),
        topologies=Topologies("GPU[-COUNT]", "cuda:h100-8", "GPU", "GPUs of one host", _known),
        guide="docs/cuda.md",
        accelerators=(NvidiaGpus(),),
    )
    platform: ClassVar[Platform] = "cuda"

    @property
    def costs(self) -> Costs:
        from llmc.compiler.targets.xla.costs import CudaCosts

        return CudaCosts(self.topology)

    def lacks(self) -> str:
        from llmc.errors import DeviceError
        from llmc.runtime.nvidia import gpus

        try:
            return "" if gpus() else "needs a host with an NVIDIA GPU"
        except DeviceError as error:
            return str(error)

    @property
    def topology(self) -> GpuTopology:
        from llmc.compiler.targets.cuda.topology import parse_topology

        return parse_topology(self._detail)

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        return nvidia(self.topology.count, "cuda", self.topology.gpu.product)

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Refuses an unusable attention kernel, and tuning results for another GPU."""
        require_kernel(options, self.topology.gpu)
        return self._tuning.configured(super().configure(options))

    def lighter(self, options: CompileOptions) -> Sequence[str]:
        """Suggest the kernel, which copies no keys and values, and rolling, which keeps one layer's copies at
        a time.
        """
        if ATTENTION.of(options) != "plain":
            return ()
        return (f"{ATTENTION.flag} pallas", *(() if ROLL_LAYERS.of(options) else (ROLL_LAYERS.flag,)))

    def dialect(self, options: CompileOptions) -> WeightlessDialect:
        return DIALECTS[ATTENTION.of(options)]

    def _native(self, step: Callable[..., Any], options: CompileOptions) -> Callable[..., Any] | None:
        if ATTENTION.of(options) == "plain":
            return None
        from llmc.compiler.targets.xla.attention.attend import with_kernel

        return with_kernel(step)

    @cached_property
    def _tuning(self) -> Tuning:
        return Tuning(self.topology.gpu.target_config())

    def tuner(self) -> Tuner:
        from llmc.compiler.targets.cuda.tuner import CudaTuner

        return CudaTuner()

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        return self._tuning.lowered(stages, super().lower(stages, programs, options), options)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        """Compile with the kernels that `--tuning` selects. The header counts the matmuls."""
        from llmc.compiler.targets.cuda.matmuls import choosing, noted
        from llmc.compiler.targets.xla.build import build

        job = self._job(lowered, shape, options)
        with choosing(self._tuning.for_xla(lowered), model=TUNING.of(options) != NONE) as (chosen, looked):
            machine = self.machine(options)
            data = build(job, replace(machine, compiler_options={**machine.compiler_options, **chosen}))
        return CompiledExecutable(noted(data, looked), self.state)

    def machine(self, options: CompileOptions) -> Machine:
        return replace(super().machine(options), compiler_options=COMPILER_OPTIONS)

    def lacks_format(self, flag: str, name: str) -> str:
        from llmc.compiler.targets.cuda.gpus import lacks_format

        return lacks_format(self.topology.gpu, flag, name)

    def toolchain(self) -> dict[str, str]:
        from llmc.compiler.targets.cuda.toolkit import versions

        return {**super().toolchain(), **versions()}

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """Add the GPU for the host that opens the bundle: its product name, and the compute capability ("9.0")."""
        from llmc.compiler.targets.cuda.matmuls import noted_in
        from llmc.compiler.targets.cuda.tuning import summary

        gpu = self.topology.gpu
        about = {"name": gpu.name, "product": gpu.product, "compute_capability": gpu.capability}
        found = super().analyse(stages, lowered, files, options)
        return {"gpu": about, "tuning": summary(noted_in(files), lowered, options), **found}

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        from llmc.compiler.targets.cuda.tuning import reported

        return [*super().describe(analysis), *reported(analysis.get("tuning", {}))]
