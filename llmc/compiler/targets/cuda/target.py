"""Described NVIDIA GPUs: `--device cuda:h100` compiles for that GPU on any host, with XLA:GPU.

    topology = gpu [ "-" count ]        gpu as in gpus.py, count one of the GPU's slices: `h100-8` is eight in one host

The compiler is in JAX's CUDA plug-in, the assembler ptxas in nvidia-cuda-nvcc; neither needs a GPU or a driver, and
CUDA need not be installed. XLA takes ptxas and nvlink from PATH, else from /usr/local/cuda (seen with jax 0.10.2 under
strace). A compiling process puts the package's folder first on PATH, so machine code does not depend on the host's
CUDA.

Layers are not rolled by default: XLA:GPU copies each layer's weights out of the stacked array in every loop iteration
(observed in its HLO, jax 0.10.2), which triples their memory traffic. Unrolled matmuls read weights in place. The price
is memory: plain attention then keeps a copy of the bucket's keys and values for all layers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.digest import digest_bytes
from llmc.compiler.options import CompileOptions, Option
from llmc.compiler.targets.base import CompiledExecutable
from llmc.compiler.targets.cuda.gpus import GPUS, NAMES, GpuSpec, gpu_of, lacks_format
from llmc.compiler.targets.cuda.toolkit import EXTRA, use_toolkit, versions
from llmc.compiler.targets.cuda.tuning import NONE, TUNING, Tuning, choosing, noted, noted_in, reported, summary
from llmc.compiler.targets.description import TRACING, Hosting, Topologies, nvidia
from llmc.compiler.targets.xla.capacity import DescribedMachine
from llmc.compiler.targets.xla.described import COMPILING, DESCRIBED, DescribedCosts, DescribedTarget, listed
from llmc.compiler.targets.xla.formats import KV_CACHE_DTYPE
from llmc.compiler.targets.xla.target import LOWERING, ROLL_LAYERS
from llmc.errors import DeviceError, InputError
from llmc.platforms import install_line
from llmc.runtime.executors.xla.client import CUDA_MEMORY_FRACTION
from llmc.runtime.nvidia import NvidiaGpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.compiler.program.program import Program, WeightlessDialect
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Lowered, Shape
    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.tuning import Tuner
    from llmc.compiler.targets.xla.build import Machine
    from llmc.runtime.executors.xla.client import Platform

EXAMPLE = "cuda:h100"
ALIGNMENT = 256
"""Size and alignment granularity of GPU allocations in bytes (BFCAllocator::kMinAllocationSize,
xla/tsl/framework/bfc_allocator.h).
"""


@dataclass(frozen=True)
class GpuTopology(DescribedMachine):
    """A number of GPUs of one model in one host."""

    gpu: GpuSpec
    count: int
    larger: ClassVar[str] = "a GPU with more memory"

    @property
    def name(self) -> str:
        return self.gpu.name if self.count == 1 else f"{self.gpu.name}-{self.count}"

    @property
    def devices(self) -> int:
        return self.count

    @property
    def usable_bytes(self) -> int:
        """The bytes of a GPU that the executor lets XLA reserve (CUDA_MEMORY_FRACTION)."""
        return int(self.gpu.memory_bytes * CUDA_MEMORY_FRACTION)

    @property
    def unit(self) -> str:
        return "GPU"

    @property
    def components(self) -> dict[str, str]:
        """The slice, and the digest of XLA's configuration of the GPU."""
        return {"topology": self.name, "gpu": digest_bytes(self.gpu.target_config().encode())}

    def array_bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        """The values' bytes, rounded up to ALIGNMENT; rows have no padding."""
        size = item_bytes
        for n in shape:
            size *= n
        return -(-size // ALIGNMENT) * ALIGNMENT

    def describe(self) -> list[Any]:
        """Raises DeviceError also without the plug-in or ptxas, and where XLA refuses."""
        use_toolkit()
        import jax

        try:
            found = _described(target_config=self.gpu.target_config(), topology=f"1x1x{self.count}")
        except (jax.errors.JaxRuntimeError, NotImplementedError) as e:
            raise DeviceError(
                f"XLA cannot describe {self.name}: {str(e).splitlines()[0]:.300}; "
                f"is this the version that llmc supports? {install_line(EXTRA)}"
            ) from e
        if len(found) != self.count:
            raise DeviceError(
                f"XLA describes {self.name} as {len(found)} devices, not {self.count}: {install_line(EXTRA)}"
            )
        return list(found)


def _described(**how: str) -> Any:
    """Raises NotImplementedError where XLA's CUDA plug-in cannot be registered.

    JAX registers it only where it finds cuDNN or JAX is set to another platform (jax_plugins/xla_cuda13/__init__.py,
    initialize). A process that used JAX before llmc may lack it. Compiling does not need cuDNN.
    """
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="cuda", topology_name="", **how).devices
    except NotImplementedError:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        import_module("jax_plugins.xla_cuda13").initialize()
        return topologies.get_topology_desc(platform="cuda", topology_name="", **how).devices


def parse_topology(text: str) -> GpuTopology:
    """Parse a topology by the module's grammar. Raises InputError that lists the known ones."""
    if not text:
        raise InputError(f"--device cuda: name the GPU, as cuda:GPU[-COUNT], for example {EXAMPLE}; {_known_gpus()}")
    gpu, count = gpu_of(text), 1
    if gpu is None and (parts := text.rpartition("-"))[2].isascii() and parts[2].isdecimal() and len(parts[2]) < 5:
        gpu, count = gpu_of(parts[0]), int(parts[2])
    if gpu is None:
        raise InputError(f"unknown GPU {text!r:.40}; {_known_gpus()}")
    if count not in gpu.slices:
        raise InputError(
            f"{gpu.name} is not offered with {count} a host; known: {', '.join(t.name for t in slices_of(gpu))}"
        )
    return GpuTopology(gpu, count)


def slices_of(gpu: GpuSpec) -> list[GpuTopology]:
    """Return the GPU alone, and several of it in one host."""
    return [GpuTopology(gpu, count) for count in gpu.slices]


def known() -> list[GpuTopology]:
    """Return every slice, by GPU, smallest first."""
    return [topology for gpu in GPUS for topology in slices_of(gpu)]


def _known_gpus() -> str:
    return f"known GPUs: {', '.join(NAMES)} (llmc devices lists how many a host)"


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
"""Autotuning is off: it runs candidates on the GPU, which is absent. See tuning.py for the alternative."""


def _known() -> list[dict[str, Any]]:
    return [listed(t, t.gpu.name, str(t.count), t.count, hosts=1) for t in known()]


class CudaCosts(DescribedCosts):
    """Cost estimates for NVIDIA GPUs."""

    executable_seconds: ClassVar[float] = 8.0
    executable_bytes: ClassVar[int] = 1_400_000


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
        return CudaCosts(self.topology)

    def lacks(self) -> str:
        from llmc.runtime.nvidia import gpus

        try:
            return "" if gpus() else "needs a host with an NVIDIA GPU"
        except DeviceError as error:
            return str(error)

    @property
    def topology(self) -> GpuTopology:
        return parse_topology(self._detail)

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        return nvidia(self.topology.count, "cuda", self.topology.gpu.product)

    def configure(self, options: CompileOptions) -> CompileOptions:
        require_kernel(options, self.topology.gpu)
        options = super().configure(options)
        if why := lacks_format(self.topology.gpu, str(options.quantize)):
            raise InputError(f"--quantize {options.quantize}: {why}")
        return self._tuning.configured(options)

    def lighter(self, options: CompileOptions) -> Sequence[str]:
        """The kernel copies no keys and values; rolling keeps one layer's copies at a time."""
        if ATTENTION.of(options) != "plain":
            return ()
        return (f"{ATTENTION.flag} pallas", *(() if ROLL_LAYERS.of(options) else (ROLL_LAYERS.flag,)))

    def dialect(self, options: CompileOptions) -> WeightlessDialect:
        return DIALECTS[ATTENTION.of(options)]

    def _native(self, step: Callable[..., Any], options: CompileOptions) -> Callable[..., Any] | None:
        if ATTENTION.of(options) == "plain":
            return None
        from llmc.compiler.targets.xla.attention import with_kernel

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
        from llmc.compiler.targets.xla.build import build

        job = self._job(lowered, shape, options)
        with choosing(self._tuning.for_xla(lowered), model=TUNING.of(options) != NONE) as (chosen, looked):
            machine = self.machine(options)
            data = build(job, replace(machine, compiler_options={**machine.compiler_options, **chosen}))
        return CompiledExecutable(noted(data, looked), self.state)

    def machine(self, options: CompileOptions) -> Machine:
        return replace(super().machine(options), compiler_options=COMPILER_OPTIONS)

    def toolchain(self) -> dict[str, str]:
        return {**super().toolchain(), **versions()}

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """Add the GPU for the host that opens the bundle: its product name, and the compute capability ("9.0")."""
        gpu = self.topology.gpu
        about = {"name": gpu.name, "product": gpu.product, "compute_capability": gpu.capability}
        found = super().analyse(stages, lowered, files, options)
        return {"gpu": about, "tuning": summary(noted_in(files), lowered, options), **found}

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        return [*super().describe(analysis), *reported(analysis.get("tuning", {}))]
