"""XLA executables through PJRT, on CPU and on the platform that they were compiled for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from llmc.artifacts.log import logger
from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription
from llmc.runtime.executors.xla.arrays import JaxArrays
from llmc.runtime.executors.xla.client import JaxMonitor, jax_version
from llmc.runtime.executors.xla.hosts import gpus_here, host_for, in_place_of
from llmc.runtime.executors.xla.programs import LoadedProgram
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS, SlotExecutor

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle


class XlaExecutor(SlotExecutor):
    """Runs XLA executables. `threads` has an effect only before JAX's first computation in this process."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription(
        {"weights": "data", "weights.json": "data", EXECUTABLES: "code", **dict.fromkeys(SLOT_PROGRAMS, "code")}
    )

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        jax_version()
        host_for(bundle).require(bundle)

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        self.compilations.monitors.append(JaxMonitor())
        self._host = host_for(bundle)
        self._devices = self._host.open(bundle.option("tensor_parallel", 1), threads)
        self.capabilities = replace(self.capabilities, in_place_of=in_place_of(bundle, self._host))
        self._begin(JaxArrays(bundle, self._devices))

    def open_all(self) -> None:
        if not self._native:
            logger().warning(
                "%s: %d executables of jax %s for %s are compiled here from their portable programs",
                self.bundle.path, len(self.bundle.manifest.executables), self.bundle.manifest.toolchain.get("jax"),
                self.bundle.manifest.device,
            )  # fmt: skip
        super().open_all()

    def _load(self, file: str, name: str) -> LoadedProgram:
        return LoadedProgram(self.bundle, file, name, self._host, self._devices, self.compilations)


class CudaExecutor(XlaExecutor):
    """The same for CUDA bundles, whose certificates record the GPU and driver."""

    description: ClassVar[ExecutorDescription] = replace(XlaExecutor.description, host=gpus_here)
