"""Arrays on JAX's devices: the weights, the cache and a step's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.executors.xla.exported import mesh_of, sharding_of
from llmc.runtime.executors.xla.slot_executor import DeviceArrays
from llmc.runtime.executors.xla.weights import DeviceWeights

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.xla.envelope import Tensor


class JaxArrays(DeviceArrays):
    """See the module's docstring."""

    def __init__(self, bundle: Bundle, devices: Sequence[Any]) -> None:
        from jax.sharding import NamedSharding, PartitionSpec

        self._weights = DeviceWeights(bundle, devices)
        self._mesh = mesh_of(devices)
        self._everywhere = devices[0] if len(devices) == 1 else NamedSharding(self._mesh, PartitionSpec())

    def zeros(self, tensor: Tensor) -> Any:
        """See `DeviceArrays.zeros`."""
        import jax.numpy as jnp

        return jnp.zeros(tensor.shape, tensor.dtype, device=sharding_of(self._mesh, tensor))

    def weight(self, tensor: Tensor) -> Any:
        """See `DeviceArrays.weight`."""
        return self._weights.array(tensor)

    def put(self, *arrays: Any) -> list[Any]:
        """See `DeviceArrays.put`."""
        import jax

        put: list[Any] = jax.device_put(list(arrays), self._everywhere)
        return put

    def put_as(self, tensors: Sequence[Tensor], *arrays: Any) -> list[Any]:
        """See `DeviceArrays.put_as`."""
        import jax

        return [jax.device_put(a, sharding_of(self._mesh, t)) for a, t in zip(arrays, tensors, strict=True)]

    def fetch(self, array: Any) -> NDArray[Any]:
        """See `DeviceArrays.fetch`."""
        return np.asarray(array)

    @property
    def weight_bytes(self) -> int:
        """See `DeviceArrays.weight_bytes`."""
        return self._weights.nbytes

    def close(self) -> None:
        """See `DeviceArrays.close`."""
        self._weights.close()
