"""A bucket's whole step as one graph of fixed shapes: read cache rows, run the program, write new tokens and states.

A portable program takes its rows' past and returns their new keys, values and states. On a CPU, the code around it
selects rows and keeps live tokens with shapes that change from step to step, and would be recompiled for each. Here it
is part of the graph, and only tensor values change:

    slots [B]           the slot that a row reads, and writes its states to; a dummy row's is the first row's
    sources [B·Q]       which new token, as row · Q + column, is written for each
    places [B·Q]        where, as slot · P + token slot, in arrays with P token slots per slot

All are int64. sources and places exist for each P (`lengths_of`), because a ring buffer keeps only the last P new
tokens, with token p in token slot p mod P. A token that is not kept is replaced by the next kept token of its row, or
the last one; a dummy row's by the first that row 0 keeps. That token is then written twice with equal values, and
nothing else is written. Likewise a dummy row writes the first row's state: sources of column 0 say whose state a row
writes. vllm-gaudi also writes new tokens by index_copy_ over flat offsets (vllm_gaudi/extension/utils.py, VLLMKVCache),
and sends others to a block that nobody reads.

The cache on the accelerator is any cache (runtime/cache_shape.py), in few arrays:

    keys and values   [tensors, slots, places, heads, width]        places: a slot's token slots
    states            [tensors, slots, *shape]

Tensors of one kind, size and dtype share one array, in the order of the cache's shape. For ring buffers, whose windows
may differ, the buffer's size counts. If all keys and values have one size, they are one array, and a step writes all
its new tokens at once.

Every cache operation runs at shapes that do not depend on lengths, because another shape would need another compiled
graph: a slot is copied, read and written whole. Each raises OutOfDeviceMemoryError if the accelerator has no room for
it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from llmc.runtime.executors.torch.cache import Array, nan_fill_tensor, read_tensor, write_tensor

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import CacheShape, Dtype, Kind
    from llmc.runtime.portable_program import PortableProgram
    from llmc.runtime.step import Step

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
        return cls(fields["kind"], fields["dtype"], tuple(fields["of_slot"]), tuple(fields["members"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def size(self, slots: int) -> tuple[int, ...]:
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


class TorchAccelerator(ABC):
    """An accelerator that this process uses. `device` is torch's name of it, `name` the one for people."""

    name: str
    device: Any

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the accelerator."""

    @abstractmethod
    def guarded(self) -> AbstractContextManager[None]:
        """Inside the block, errors for lack of memory become OutOfDeviceMemoryError."""

    def put(self, tensor: Any) -> Any:
        """Copy a host tensor to the accelerator. Raises OutOfDeviceMemoryError."""
        with self.guarded():
            return tensor.to(self.device)

    def mark_step(self) -> None:  # noqa: B027 - most launch operators when they are called
        """Run accumulated operators as one graph, on accelerators that accumulate them."""


class AcceleratorCache:
    """Slots of up to `capacity` tokens; `arrays` describes the `tensors`, which are empty until `make`."""

    def __init__(self, accelerator: TorchAccelerator, shape: CacheShape, capacity: int, dtype: Dtype) -> None:
        self._accelerator, self._shape = accelerator, shape
        self.arrays = arrays_of(shape, capacity, dtype)
        self.lengths = lengths_of(self.arrays)
        self.tensors: list[Any] = []

    @property
    def slot_bytes(self) -> int:
        return sum(array.slot_bytes for array in self.arrays)

    @property
    def nbytes(self) -> int:
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
        del length
        with self._guarded():
            for tensor in self.tensors:
                row = tensor.index_select(1, self._index(source))
                tensor.index_copy_(1, self._index(target), row)
        self._accelerator.mark_step()

    def read(self, slot: int, length: int) -> list[Array]:
        held = self._tensors(self._read(slot))
        return [read_tensor(t, each, length) for t, each in zip(self._shape, held, strict=True)]

    def write(self, slot: int, length: int, prefix: Sequence[Array]) -> None:
        """Write the result of `read` to a slot, with zeros after the tokens."""
        rows = [torch_zeros(array, 1).squeeze(1) for array in self.arrays]
        for t, each, given in zip(self._shape, self._tensors(rows), prefix, strict=True):
            write_tensor(t, each, length, given)
        self._write(slot, rows)

    def nan_fill(self, slot: int, start: int, value: float, used: int = 0) -> None:
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


Run: TypeAlias = Callable[..., Sequence[Any]]
"""A step's function. Its input and output tensors are on the accelerator."""


def flat_step(program: PortableProgram, context: int, arrays: Sequence[AcceleratorArray]) -> Run:
    """A program over any cache in such `arrays`. Arguments: `inputs`, the arrays, the weights, all on one device.

    It writes the live rows' new tokens and states into the arrays, and returns logits [B, V], and the top values and
    ids [B, K] if the program has them.
    """
    import torch

    lengths = lengths_of(arrays)
    first, entries = 2 * len(lengths), sum(len(array.members) for array in arrays)

    def step(token_ids: Any, past: Any, new: Any, slots: Any, *rest: Any) -> list[Any]:
        written = dict(zip(lengths, zip(rest[:first:2], rest[1:first:2], strict=True), strict=True))
        kept, weights = rest[first : first + len(arrays)], rest[first + len(arrays) :]
        held: dict[int, Any] = {}
        if program.cache_inputs:
            for array, tensor in zip(arrays, kept, strict=True):
                # tensor by tensor, so that a compiler reads each where its layer does, and copies no whole past
                for i, each in zip(array.members, tensor.unbind(0), strict=True):
                    if array.kind == "kv":
                        read = min(context, array.of_slot[0])
                        held[i] = each.narrow(1, 0, read).index_select(0, slots).transpose(1, 2)
                    else:
                        held[i] = each.index_select(0, slots)
        found = program.run(token_ids, past, new, *(held[i] for i in range(len(held))), *weights)
        built = found[-entries:]
        for array, tensor in zip(arrays, kept, strict=True):
            entry = torch.stack([built[i] for i in array.members])
            if array.kind == "kv":
                sources, offsets = written[array.of_slot[0]]
                flat = (len(array.members), -1, *tensor.shape[3:])
                tokens = entry.transpose(2, 3).reshape(flat).index_select(1, sources)
                tensor.view(flat).index_copy_(1, offsets, tokens)
            else:
                query = token_ids.shape[1]
                rows = rest[0].view(token_ids.shape).select(1, 0).div(query, rounding_mode="floor")
                tensor.index_copy_(1, slots, entry.index_select(1, rows).to(tensor.dtype))
        return list(found[:-entries])

    return step


def step_program(flat: Run, weights: Sequence[Any], cache: AcceleratorCache) -> Run:
    """A step over the current `cache`. A call with `inputs` returns `flat_step`'s outputs."""

    def step(*given: Any) -> list[Any]:
        return list(flat(*given, *cache.tensors, *weights))

    return step


def inputs(step: Step, lengths: Sequence[int]) -> list[Any]:
    """A step's arguments on the host, for arrays of such `lengths`; the step must have a live row."""
    import torch

    live, (batch, query) = len(step.slots), step.token_ids.shape
    slots = np.full(batch, step.slots[0], np.int64)
    slots[:live] = step.slots
    rows = np.where(np.arange(batch) < live, np.arange(batch), 0)[:, None]
    arrays = [step.token_ids, step.past_lengths, step.new_lengths, slots]
    for length in lengths:
        columns = np.clip(np.arange(query), step.new_lengths[:, None] - length, step.new_lengths[:, None] - 1)
        columns[live:] = columns[0, 0]
        offsets = slots[rows] * length + (step.past_lengths[rows] + columns) % length
        arrays += [(rows * query + columns).ravel(), offsets.ravel()]
    return [torch.from_numpy(np.array(array, np.int64)) for array in arrays]


def whole_graph(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`run` as one graph of fixed shapes, compiled by its first call with torch.compile's `options`.

    torch._dynamo stores at most 8 compiled graphs with a function's code, so each graph gets its own code object.
    """
    import torch

    assert isinstance(run, FunctionType)
    own = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    built: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=False, **options)
    return built
