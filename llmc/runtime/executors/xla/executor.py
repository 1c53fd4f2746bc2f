"""XLA executables through PJRT, on CPU and on the platform that they were compiled for.

An encoder has one per bucket (texts × tokens), each opened on first use. Its batches run one after another, each on all
CPUs, because XLA has one thread pool per process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.log import logger
from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription
from llmc.runtime.executors.encoders import Encoder
from llmc.runtime.executors.xla.client import JaxMonitor, jax_version, reporting
from llmc.runtime.executors.xla.hosts import gpus_here, host_for, in_place_of
from llmc.runtime.executors.xla.programs import LoadedProgram
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS, JaxArrays, SlotExecutor

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
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


class XlaEncoder(Encoder):
    """Runs an encoder's executables. `threads` has an effect only before JAX's first computation in this process."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription(
        {"weights": "data", "weights.json": "data", EXECUTABLES: "code"}
    )

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        jax_version()
        host_for(bundle).require(bundle)

    def __init__(self, bundle: Bundle, threads: int) -> None:
        super().__init__(bundle, threads)
        self._host = host_for(bundle)
        self.capabilities = replace(self.capabilities, in_place_of=in_place_of(bundle, self._host))
        self._devices = self._host.open(1, threads)
        self._arrays = JaxArrays(bundle, self._devices)

    def encode(self, inputs: Mapping[str, NDArray[np.int64]], stream: int = 0) -> NDArray[np.float32]:
        program, weights = self._open(self.executable_for(*inputs["token_ids"].shape))
        given = [inputs[t.name].astype(np.int32) for t in program.header.inputs if t.name in inputs]
        with reporting(self.compilations.record):
            (built,) = program.run([*self._arrays.put(*given), *weights])
        return self._arrays.fetch(built)

    def _load(self, executable: Executable) -> tuple[LoadedProgram, list[Any]]:
        program = LoadedProgram(
            self.bundle, executable.blob, str(executable), self._host, self._devices, self.compilations
        )
        if program.native:
            self.compilations.loaded(str(executable))
        elif not self._opened:
            logger().warning(
                "%s: executables of jax %s for %s are compiled here from their portable programs, each when it is "
                "first needed", self.bundle.path, program.header.jax, self.bundle.manifest.device,
            )  # fmt: skip
        with reporting(self.compilations.opened):
            weights = [self._arrays.weight(t) for t in program.header.inputs if t.name not in self.inputs]
        return program, weights

    def memory(self) -> dict[str, int]:
        opened = sum(self.bundle.manifest.blobs[blob] for blob in self._opened)
        return {"weights": self._arrays.weight_bytes, "executables": opened}

    def close(self) -> None:
        super().close()
        self._arrays.close()
