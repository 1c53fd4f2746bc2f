"""A module on this host's CPU: proves a bundle's plan, padding and numbers where there is no NeuronCore.

Ranks are replicas of one module, on so many devices of the CPU; what they exchange is what NeuronCores exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmc.errors import ArtifactError
from llmc.runtime.executors.neuron.files import NeuronFile
from llmc.runtime.executors.xla.exported import mesh_of, sharding_of


class HloProgram:
    """A module compiled for this CPU, ready to run."""

    native = False

    def __init__(self, file: NeuronFile, devices: Sequence[Any], source: str) -> None:
        """Raises ArtifactError for a module that XLA refuses."""
        self.header = file.header
        mesh = mesh_of(devices)
        self._shardings = [sharding_of(mesh, tensor) for tensor in self.header.outputs]
        try:
            self._run = compiled(file.hlo, devices)
        except Exception as e:
            raise ArtifactError(
                f"{source}: XLA cannot compile the module for this CPU ({e!s:.300}); compile the bundle again"
            ) from e

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """See `SlotProgram.run`."""
        from jax import make_array_from_single_device_arrays as joined

        parts = self._run.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [
            joined(tensor.shape, sharding, part)
            for tensor, sharding, part in zip(self.header.outputs, self._shardings, parts, strict=True)
        ]


def compiled(hlo: bytes, devices: Sequence[Any]) -> Any:
    """A module as an executable of PJRT, a replica on each device."""
    from jax._src.compiler import get_compile_options
    from jaxlib import _jax

    order = np.array([device.id for device in devices], np.int32).reshape(-1, 1)
    options = get_compile_options(num_replicas=len(devices), num_partitions=1, device_assignment=order)
    listed = _jax.DeviceList(tuple(devices))
    return devices[0].client.compile_and_load(_jax.mlir.hlo_to_stablehlo(hlo), listed, options)
