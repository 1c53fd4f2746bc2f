"""A bundle's weights as arrays on the devices: on CPU, views of the mapped file that all processes share."""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError
from llmc.runtime.executors.weight_places import map_weights, read_places
from llmc.runtime.executors.xla.exported import mesh_of, sharding_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.xla.envelope import Tensor


class WeightViews:
    """Weights by name, as views of the mapped file."""

    def __init__(self, bundle: Bundle) -> None:
        self._source = str(bundle.path)
        self._places = read_places(bundle)
        self._mapped = map_weights(bundle, mmap.ACCESS_READ)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights file."""
        return len(self._mapped)

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """The weight that an input asks for, checked against it. Raises ArtifactError."""
        place = self._places.get(tensor.name)
        if place is None:
            raise ArtifactError(f"{self._source}: weights.json has no {tensor.name}; compile the bundle again")
        dtype = dtype_of(tensor.dtype)
        offset, length = place["offset"], place["length"]
        if (tuple(place["shape"]), place["dtype"]) != (tensor.shape, tensor.dtype) or (
            length != math.prod(tensor.shape) * dtype.itemsize or not 0 <= offset <= len(self._mapped) - length
        ):
            raise ArtifactError(
                f"{self._source}: weight {tensor.name} is {place['dtype']} {place['shape']}, the executable takes "
                f"{tensor.dtype} {list(tensor.shape)}; compile the bundle again"
            )
        return np.frombuffer(self._mapped, dtype, math.prod(tensor.shape), offset).reshape(tensor.shape)


class DeviceWeights:
    """Weights by name, each put on the devices when first asked for, in the parts that they need of it."""

    def __init__(self, bundle: Bundle, devices: Sequence[Any]) -> None:
        self._views = WeightViews(bundle)
        self._mesh = mesh_of(devices)
        self._arrays: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the weights file."""
        return self._views.nbytes

    def array(self, tensor: Tensor) -> Any:
        """The weight that an input asks for, checked against it. Raises ArtifactError."""
        if tensor.name not in self._arrays:
            import jax

            self._arrays[tensor.name] = jax.device_put(
                self._views.array(tensor), sharding_of(self._mesh, tensor), may_alias=True
            )
        return self._arrays[tensor.name]

    def close(self) -> None:
        """Drop the arrays; the pages are unmapped with the last of them."""
        self._arrays.clear()


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of an envelope's; those that NumPy lacks are ml_dtypes'."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
