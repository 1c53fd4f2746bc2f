"""An encoder's executables through PJRT, one per bucket (texts × tokens), each opened on first use.

Weights are transferred once and passed to all executables. Batches run one after another, each on all CPUs, because XLA
has one thread pool per process. Bundles for another platform run on this host's CPU from their portable programs, like
those of generating models.
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
from llmc.runtime.executors.xla.arrays import JaxArrays
from llmc.runtime.executors.xla.client import jax_version, reporting
from llmc.runtime.executors.xla.hosts import host_for, in_place_of
from llmc.runtime.executors.xla.programs import LoadedProgram

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle


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
