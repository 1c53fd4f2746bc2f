"""The cache on the accelerator: any cache (runtime/cache_shape.py), in few arrays.

    keys and values   [tensors, slots, places, heads, width]        places: a slot's token slots
    states            [tensors, slots, *shape]

Tensors of one kind, size and dtype share one array, in the order of the cache's shape. For ring buffers, whose windows
may differ, the buffer's size counts. If all keys and values have one size, they are one array, and a step writes all
its new tokens at once.

Every operation runs at shapes that do not depend on lengths, because another shape would need another compiled graph: a
slot is copied, read and written whole. Each raises OutOfDeviceMemoryError if the accelerator has no room for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llmc.runtime.executors.torch.cache import Array, nan_fill_tensor, read_tensor, write_tensor

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import CacheShape, Dtype, Kind

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""torch's dtype names."""


@dataclass(frozen=True)
class AcceleratorArray:
    """One array. `of_slot`: its sizes without tensors and slots; `members`: the cache tensors in it."""

    kind: Kind
    dtype: Dtype
    of_slot: tuple[int, ...]
    members: tuple[int, ...]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AcceleratorArray:
        """Parse the result of `to_json`."""
        return cls(fields["kind"], fields["dtype"], tuple(fields["of_slot"]), tuple(fields["members"]))

    def to_json(self) -> dict[str, Any]:
        """JSON for another process."""
        return asdict(self)

    def size(self, slots: int) -> tuple[int, ...]:
        """Its shape for so many slots."""
        return (len(self.members), slots, *self.of_slot)

    @property
    def slot_bytes(self) -> int:
        return len(self.members) * math.prod(self.of_slot) * (4 if self.dtype == "f32" else 2)

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.of_slot))
        return f"{self.kind} {self.dtype} [{len(self.members)}, slots, {inner}]"


def lengths_of(arrays: Sequence[AcceleratorArray]) -> tuple[int, ...]:
    """The distinct numbers of token slots in a cache slot's keys and values; (1,) without any."""
    return tuple(dict.fromkeys(array.of_slot[0] for array in arrays if array.kind == "kv")) or (1,)


def cache_arrays(bundle: Bundle, capacity: int) -> tuple[AcceleratorArray, ...]:
    """The arrays of a bundle's cache with slots of `capacity` tokens. Raises ArtifactError without a cache."""
    return arrays_of(bundle.cache_shape, capacity, dtype_of(bundle))


def dtype_of(bundle: Bundle) -> Dtype:
    """The dtype in which a bundle's programs compute."""
    return "bf16" if bundle.manifest.options.get("dtype") == "bf16" else "f32"


def arrays_of(shape: CacheShape, capacity: int, dtype: Dtype) -> tuple[AcceleratorArray, ...]:
    """The arrays of a cache with slots of `capacity` tokens, in `dtype` unless a tensor has its own."""
    found: dict[tuple[Kind, Dtype, tuple[int, ...]], list[int]] = {}
    for i, t in enumerate(shape):
        of_slot = (t.token_slots(capacity), *t.shape) if t.kind == "kv" else t.shape
        found.setdefault((t.kind, t.dtype or dtype, of_slot), []).append(i)
    return tuple(AcceleratorArray(*like, tuple(members)) for like, members in found.items())


class TorchAccelerator(Protocol):
    """An accelerator that this process uses. `device` is torch's name of it, `name` the one for people."""

    name: str
    device: Any

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the accelerator."""
        ...

    def put(self, tensor: Any) -> Any:
        """Copy a host tensor to the accelerator. Raises OutOfDeviceMemoryError."""
        ...

    def guarded(self) -> AbstractContextManager[None]:
        """Inside the block, errors for lack of memory become OutOfDeviceMemoryError."""
        ...

    def mark_step(self) -> None:
        """Run accumulated operators as one graph, on accelerators that accumulate them; otherwise do nothing."""
        ...


class AcceleratorCache:
    """A cache of slots of up to `capacity` tokens, in `dtype` unless a tensor has its own.

    `arrays` describes the `tensors`, one for each, which are empty until `make`.
    """

    def __init__(self, accelerator: TorchAccelerator, shape: CacheShape, capacity: int, dtype: Dtype) -> None:
        self._accelerator, self._shape = accelerator, shape
        self.arrays = arrays_of(shape, capacity, dtype)
        self.lengths = lengths_of(self.arrays)
        self.tensors: list[Any] = []

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: all its tokens, and its states."""
        return sum(array.slot_bytes for array in self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes on the accelerator."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def make(self, slots: int) -> None:
        """Allocate an empty cache. If it does not fit, the old one is kept."""
        with self._guarded():
            self.tensors = [torch_zeros(array, slots, self._accelerator.device) for array in self.arrays]
        self._accelerator.mark_step()

    def warm(self) -> None:
        """Copy, read and write slots once, so that nothing is compiled for these later."""
        self.copy(0, 0)
        self._write(0, self._read(0))

    def drop(self) -> None:
        self.tensors = []

    def copy(self, source: int, target: int, length: int = 0) -> None:
        """Copy slot `source` to slot `target`, whatever its length."""
        del length
        with self._guarded():
            for tensor in self.tensors:
                row = tensor.index_select(1, self._index(source))
                tensor.index_copy_(1, self._index(target), row)
        self._accelerator.mark_step()

    def read(self, slot: int, length: int) -> list[Array]:
        """Float32 copies of a slot's first tokens and of its states (`TorchCache.read`)."""
        held = self._tensors(self._read(slot))
        return [read_tensor(t, each, length) for t, each in zip(self._shape, held, strict=True)]

    def write(self, slot: int, length: int, prefix: Sequence[Array]) -> None:
        """Write the result of `read` to a slot, with zeros after the tokens."""
        rows = [torch_zeros(array, 1).squeeze(1) for array in self.arrays]
        for t, each, given in zip(self._shape, self._tensors(rows), prefix, strict=True):
            write_tensor(t, each, length, given)
        self._write(slot, rows)

    def nan_fill(self, slot: int, start: int, value: float, used: int = 0) -> None:
        """Fill a slot that has held `used` tokens from token `start` on (`TorchCache.nan_fill`)."""
        rows = self._read(slot)
        for t, each in zip(self._shape, self._tensors(rows), strict=True):
            nan_fill_tensor(t, each, start, value, used)
        self._write(slot, rows)

    def _tensors(self, rows: Sequence[Any]) -> list[Any]:
        """Views of each tensor in a slot's part of each array, laid out as in torch/cache.py, in the shape's order."""
        found: dict[int, Any] = {}
        for array, row in zip(self.arrays, rows, strict=True):
            found |= zip(array.members, row.transpose(1, 2) if array.kind == "kv" else row, strict=True)
        return [found[i] for i in range(len(found))]

    def _read(self, slot: int) -> list[Any]:
        """Host copies of a slot, [tensors, …] for each array."""
        with self._guarded():
            rows = [tensor.index_select(1, self._index(slot)).cpu().squeeze(1) for tensor in self.tensors]
        return [row.clone() for row in rows]  # those that may be written to

    def _write(self, slot: int, rows: Sequence[Any]) -> None:
        with self._guarded():
            for tensor, row in zip(self.tensors, rows, strict=True):
                tensor.index_copy_(1, self._index(slot), self._accelerator.put(row.unsqueeze(1)))
        self._accelerator.mark_step()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        import torch

        with self._accelerator.guarded(), torch.inference_mode():
            yield

    def _index(self, slot: int) -> Any:
        import torch

        return self._accelerator.put(torch.tensor([slot]))


def torch_zeros(array: AcceleratorArray, slots: int, device: Any = "cpu") -> Any:
    """A zeroed array of so many slots."""
    import torch

    return torch.zeros(array.size(slots), dtype=getattr(torch, DTYPES[array.dtype]), device=device)
