"""GPUs of one host, described without hardware: `h100-8` is eight H100 in one machine, `h100` is one.

topology = gpu [ "-" count ]        gpu as in gpus.py, count one of the GPU's slices
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from llmc.artifacts.digest import digest_bytes
from llmc.compiler.targets.cuda.gpus import GPUS, NAMES, GpuSpec, gpu_of
from llmc.compiler.targets.cuda.toolkit import EXTRA, use_toolkit
from llmc.compiler.targets.xla.capacity import DescribedMachine
from llmc.errors import DeviceError, InputError
from llmc.platforms import install_line
from llmc.runtime.executors.xla.client import CUDA_MEMORY_FRACTION

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
        """Return the slice's JAX devices, which compile but do not run; xla/client.py prepares the process.

        Raises DeviceError, with the install line, without the plug-in or ptxas, and where XLA refuses.
        """
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
    """JAX's devices of a topology. Raises NotImplementedError where XLA's CUDA plug-in cannot be registered.

    JAX registers plug-ins when it starts, and this one only where it finds cuDNN or JAX is set to another platform
    (jax_plugins/xla_cuda13/__init__.py, initialize). A process that used JAX before llmc may lack it. Compiling does
    not need cuDNN.
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
        raise InputError(f"--device cuda: name the GPU, as cuda:GPU[-COUNT], for example {EXAMPLE}; {_known()}")
    gpu, count = gpu_of(text), 1
    if gpu is None and (parts := text.rpartition("-"))[2].isascii() and parts[2].isdecimal() and len(parts[2]) < 5:
        gpu, count = gpu_of(parts[0]), int(parts[2])
    if gpu is None:
        raise InputError(f"unknown GPU {text!r:.40}; {_known()}")
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


def _known() -> str:
    return f"known GPUs: {', '.join(NAMES)} (llmc devices lists how many a host)"
