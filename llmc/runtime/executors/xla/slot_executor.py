"""Steps over a cache that stays on the device, for all compilers of XLA's programs.

The cache of all slots is on the device, one array for each of `CacheShape.groups`: keys or values [layers, slots,
kv_heads, token slots, head_dim], states [layers, slots, …], sized at compile time. A step takes them, writes the live
rows' live tokens and states into their slots, and returns them in place; a larger bucket reads more tokens. Other slot
operations (copies, import, export, NaN fill) are also programs of the bundle. On CPU, weights are views of the mapped
file, which all processes share.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError, InputError
from llmc.runtime.executors.base import StaticExecutor
from llmc.runtime.executors.slots import SlotLengths, windows
from llmc.runtime.executors.weight_placements import map_weights, read_placements
from llmc.runtime.executors.xla.client import reporting
from llmc.runtime.executors.xla.programs import mesh_of, sharding_of
from llmc.runtime.step import ADAPTERS
from llmc.runtime.top_logits import TopLogits

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import CacheTensor
    from llmc.runtime.executors.xla.envelope import StepHeader, Tensor
    from llmc.runtime.step import Step


class DeviceArrays(ABC):
    """Creates and fetches a program's device arrays. A weight is transferred on first use."""

    def __init__(self, bundle: Bundle) -> None:
        self._views = WeightViews(bundle)
        self._weights: dict[str, Any] = {}

    @abstractmethod
    def zeros(self, tensor: Tensor) -> Any:
        """A new array of zeros, sharded over the devices as the tensor says."""

    def weight(self, tensor: Tensor) -> Any:
        """The bundle's weight for an input. Raises ArtifactError if there is none of that shape."""
        if tensor.name not in self._weights:
            self._weights[tensor.name] = self._put_weight(tensor, self._views.array(tensor))
        return self._weights[tensor.name]

    @abstractmethod
    def _put_weight(self, tensor: Tensor, array: NDArray[Any]) -> Any:
        """A weight in the shards that the devices need."""

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
    def weight_bytes(self) -> int:
        """Bytes of the weights file."""
        return self._views.nbytes

    def close(self) -> None:
        """Drop the weights."""
        self._weights.clear()


class JaxArrays(DeviceArrays):
    """Arrays on JAX's devices."""

    def __init__(self, bundle: Bundle, devices: Sequence[Any]) -> None:
        from jax.sharding import NamedSharding, PartitionSpec

        super().__init__(bundle)
        self._mesh = mesh_of(devices)
        self._everywhere = devices[0] if len(devices) == 1 else NamedSharding(self._mesh, PartitionSpec())

    def zeros(self, tensor: Tensor) -> Any:
        import jax.numpy as jnp

        return jnp.zeros(tensor.shape, tensor.dtype, device=sharding_of(self._mesh, tensor))

    def _put_weight(self, tensor: Tensor, array: NDArray[Any]) -> Any:
        import jax

        return jax.device_put(array, sharding_of(self._mesh, tensor), may_alias=True)

    def put(self, *arrays: Any) -> list[Any]:
        import jax

        put: list[Any] = jax.device_put(list(arrays), self._everywhere)
        return put

    def put_as(self, tensors: Sequence[Tensor], *arrays: Any) -> list[Any]:
        import jax

        return [jax.device_put(a, sharding_of(self._mesh, t)) for a, t in zip(arrays, tensors, strict=True)]

    def fetch(self, array: Any) -> NDArray[Any]:
        return np.asarray(array)


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


Array = NDArray[np.float32]
STEP_INPUTS = 4
"""A step's inputs before the cache: token ids, past lengths, new lengths and slots; adapters come after them."""
SLOT_PROGRAMS = ("slot_copy", "slot_fill", "slot_read", "slot_write")


class SlotProgram(Protocol):
    """A program that is ready to run."""

    header: StepHeader
    """Its inputs and outputs."""
    native: bool
    """Whether it was opened from native code, not compiled here."""

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Outputs, as arrays on the devices. Donated arguments are invalid afterwards."""


class SlotExecutor(StaticExecutor):
    """Runs steps and slot operations as programs. A subclass calls `_begin` once it can load programs."""

    _arrays: DeviceArrays

    def _begin(self, arrays: DeviceArrays) -> None:
        """Load the programs that work on slots, and allocate the cache."""
        self._arrays = arrays
        self._programs: dict[str, SlotProgram] = {}
        for file in SLOT_PROGRAMS:
            if file not in self.bundle.manifest.files:
                raise ArtifactError(f"{self.bundle.path}: no {file} in the bundle; compile it again")
        self._slot_programs = {name: self._load(name, name) for name in SLOT_PROGRAMS}
        self._native = self._slot_programs["slot_fill"].native
        self._shape = self.bundle.cache_shape
        self._likes = [group[0] for group in self._shape.groups]
        cache = self._slot_programs["slot_fill"].header.inputs[: len(self._likes)]
        exact_dtype = "f32" if any(t.dtype == "float32" for t in cache) else "bf16"  # which holds float8's numbers
        self.capabilities = replace(self.capabilities, cache_dtype=exact_dtype)
        _, held, *_ = cache[0].shape
        if self.slots > held:
            raise InputError(
                f"{self.bundle.path}: its cache holds {held} sequences, {self.slots} were requested; compile it with "
                f"--cache-slots {self.slots}"
            )
        whole = (t.shape[3] for like, t in zip(self._likes, cache, strict=True) if like.kind == "kv" and not like.ring)
        self.capacity = min([self.capacity, *whole])
        with reporting(self.compilations.opened):
            self._cache = [arrays.zeros(t) for t in cache]
        self._bound: dict[str, list[Any]] = {}
        self._adapted = bool(self.bundle.adapters)
        self._held = SlotLengths(self.slots, self._shape.rewind)
        self._outputs: list[Any] = []

    @abstractmethod
    def _load(self, file: str, name: str) -> SlotProgram:
        """The program in one of the bundle's files; `name` is for messages."""

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """If programs must be compiled here, all are, so that none is compiled while a request waits for it."""
        if not self._native:
            self.open_all()
        super().warm(steps)

    def run(self, step: Step) -> Array:
        self._run(step)
        return self.logits()

    def run_top(self, step: Step) -> TopLogits:
        """Run a step and return the top logits; XLA's top-k orders ties by lower id."""
        self._require_top()
        self._run(step)
        values, ids = map(self._arrays.fetch, self._outputs[1:3])
        return TopLogits(values, ids.astype(np.int64))

    def logits(self) -> Array:
        if self._outputs:
            self._keep(self._arrays.fetch(self._outputs[0]))
        return super().logits()

    def _run(self, step: Step) -> None:
        self._check_step(step, self._held, first_slots=True)
        program, weights = self._open(self._executable(step))
        slots = np.full(step.batch, -1)
        slots[: len(step.slots)] = step.slots
        rows = [step.token_ids, step.past_lengths, step.new_lengths, slots]
        if self._adapted:
            rows.append(step.row_adapters)
        given = self._arrays.put(*(a.astype(np.int32) for a in rows))
        with reporting(self.compilations.record):
            built = program.run([*given, *self._cache, *weights])
        first = len(built) - len(self._cache)
        self._outputs, self._cache = built[:first], built[first:]
        self._held.ran(step)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._held.require(source, length)
        if source != target:
            self._change("slot_copy", *self._numbers(source, target, length))
        self._held.copied(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        self._held.require(slot, length)
        built = self._slot_programs["slot_read"].run([*self._cache, *self._numbers(slot)])
        rows = [self._arrays.fetch(r).astype(np.float32) for r in built]
        rows = [
            row if like.kind == "state" else windows(like, row, length)
            for like, row in zip(self._likes, rows, strict=True)
        ]
        return [rows[group][index] for group, index in self._shape.offsets]

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Write a slot, rounded to the cache's dtype; in 8 bits, values out of range are clipped."""
        length = self._check_prefix(prefix, len(self._shape))
        inputs = self._slot_programs["slot_write"].header.inputs[len(self._cache) + 2 :]
        rows = [np.zeros(tensor.shape, dtype_of(tensor.dtype)) for tensor in inputs]
        for (group, index), given in zip(self._shape.offsets, prefix, strict=True):
            _fill_row(self._likes[group], rows[group][index], given, length)
        self._change("slot_write", *self._numbers(slot, length), *self._arrays.put_as(inputs, *rows))
        self._held.imported(slot, length)

    def nan_fill(self, slot: int, start: int, value: float) -> None:
        self._change(
            "slot_fill", *self._numbers(slot, start, self._held.used[slot]), *self._arrays.put(np.float32(value))
        )

    def memory(self) -> dict[str, int]:
        opened = sum(self.bundle.manifest.blobs[blob] for blob in self._bound)
        return {
            "cache": sum(c.nbytes for c in self._cache), "weights": self._arrays.weight_bytes, "executables": opened,
        }  # fmt: skip

    def close(self) -> None:
        self._programs.clear()
        self._slot_programs.clear()
        self._bound.clear()
        self._arrays.close()
        self._cache, self._outputs, self._logits = [], [], None

    def _open(self, executable: Executable) -> tuple[SlotProgram, list[Any]]:
        if executable.blob not in self._bound:
            program = self._programs[executable.blob] = self._load(executable.blob, str(executable))
            inputs = program.header.inputs
            if self._adapted != (inputs[STEP_INPUTS].name == ADAPTERS):
                raise ArtifactError(
                    f"{self.bundle.path}: {executable} and the manifest differ on whether requests choose an adapter; "
                    "compile it again"
                )
            first = STEP_INPUTS + self._adapted + len(self._cache)
            with reporting(self.compilations.opened):
                self._bound[executable.blob] = [self._arrays.weight(t) for t in inputs[first:]]
        return self._programs[executable.blob], self._bound[executable.blob]

    def _change(self, program: str, *arguments: Any) -> None:
        with reporting(self.compilations.record):
            self._cache = self._slot_programs[program].run([*self._cache, *arguments])

    def _numbers(self, *numbers: int) -> list[Any]:
        return self._arrays.put(*(np.int32(n) for n in numbers))


def _fill_row(like: CacheTensor, row: NDArray[Any], given: Array, length: int) -> None:
    """Copy a prefix's tensor into a row [heads, token slots, width], or a state's, rounded to its dtype."""
    from ml_dtypes import finfo

    if row.dtype.itemsize == 1:
        largest = float(finfo(row.dtype).max)
        given = np.clip(given, -largest, largest)
    if like.kind == "state":
        row[:] = given
        return
    tokens = np.arange(max(0, length - row.shape[1]), length)
    row[:, tokens % row.shape[1]] = given[:, tokens]
