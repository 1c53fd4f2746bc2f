"""A program's arguments and results as device arrays: the weights, the cache and a step's inputs.

On CPU, weights are views of the mapped file, which all processes share.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError
from llmc.runtime.executors.weight_placements import map_weights, read_placements
from llmc.runtime.executors.xla.programs import mesh_of, sharding_of

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.xla.envelope import Tensor


class DeviceArrays(ABC):
    """Creates and fetches a program's device arrays."""

    @abstractmethod
    def zeros(self, tensor: Tensor) -> Any:
        """A new array of zeros, sharded over the devices as the tensor says."""

    @abstractmethod
    def weight(self, tensor: Tensor) -> Any:
        """The bundle's weight for an input. Raises ArtifactError if there is none of that shape."""

    @abstractmethod
    def put(self, *arrays: Any) -> list[Any]:
        """Small inputs, replicated on every device."""

    @abstractmethod
    def put_as(self, tensors: Sequence[Tensor], *arrays: Any) -> list[Any]:
        """Inputs, sharded over the devices as the tensors say."""

    @abstractmethod
    def fetch(self, array: Any) -> NDArray[Any]:
        """A whole result on the host."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of the weights file."""

    @abstractmethod
    def close(self) -> None:
        """Drop the weights."""


class JaxArrays(DeviceArrays):
    """Arrays on JAX's devices. A weight is transferred on first use, in the shards that the devices need."""

    def __init__(self, bundle: Bundle, devices: Sequence[Any]) -> None:
        from jax.sharding import NamedSharding, PartitionSpec

        self._views = WeightViews(bundle)
        self._weights: dict[str, Any] = {}
        self._mesh = mesh_of(devices)
        self._everywhere = devices[0] if len(devices) == 1 else NamedSharding(self._mesh, PartitionSpec())

    def zeros(self, tensor: Tensor) -> Any:
        import jax.numpy as jnp

        return jnp.zeros(tensor.shape, tensor.dtype, device=sharding_of(self._mesh, tensor))

    def weight(self, tensor: Tensor) -> Any:
        if tensor.name not in self._weights:
            import jax

            self._weights[tensor.name] = jax.device_put(
                self._views.array(tensor), sharding_of(self._mesh, tensor), may_alias=True
            )
        return self._weights[tensor.name]

    def put(self, *arrays: Any) -> list[Any]:
        import jax

        put: list[Any] = jax.device_put(list(arrays), self._everywhere)
        return put

    def put_as(self, tensors: Sequence[Tensor], *arrays: Any) -> list[Any]:
        import jax

        return [jax.device_put(a, sharding_of(self._mesh, t)) for a, t in zip(arrays, tensors, strict=True)]

    def fetch(self, array: Any) -> NDArray[Any]:
        return np.asarray(array)

    @property
    def weight_bytes(self) -> int:
        return self._views.nbytes

    def close(self) -> None:
        self._weights.clear()


class WeightViews:
    """Weights by name, as views of the mapped file."""

    def __init__(self, bundle: Bundle) -> None:
        self._source = str(bundle.path)
        self._placements = read_placements(bundle)
        self._mapped = map_weights(bundle, mmap.ACCESS_READ)

    @property
    def nbytes(self) -> int:
        return len(self._mapped)

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """The weight for an input, checked against it. Raises ArtifactError."""
        placement = self._placements.get(tensor.name)
        if placement is None:
            raise ArtifactError(f"{self._source}: weights.json has no {tensor.name}; compile the bundle again")
        dtype = dtype_of(tensor.dtype)
        offset, length = placement["offset"], placement["length"]
        if (tuple(placement["shape"]), placement["dtype"]) != (tensor.shape, tensor.dtype) or (
            length != math.prod(tensor.shape) * dtype.itemsize or not 0 <= offset <= len(self._mapped) - length
        ):
            raise ArtifactError(
                f"{self._source}: weight {tensor.name} is {placement['dtype']} {placement['shape']}, the executable "
                f"takes {tensor.dtype} {list(tensor.shape)}; compile the bundle again"
            )
        return np.frombuffer(self._mapped, dtype, math.prod(tensor.shape), offset).reshape(tensor.shape)


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype for an envelope's dtype; those that NumPy lacks come from ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
