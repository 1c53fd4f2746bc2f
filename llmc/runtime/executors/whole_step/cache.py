"""The cache on the card, in the arrays of layout.py.

Whatever is asked for runs at shapes that do not depend on lengths, because another shape is another graph to compile:
a slot is copied, read and written whole. Each raises OutOfDeviceMemoryError where the card has no room for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmc.runtime.executors.torch.cache import Array, poison_tensor, read_tensor, write_tensor
from llmc.runtime.executors.whole_step.layout import DTYPES, arrays_of, lengths_of

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape, Dtype
    from llmc.runtime.executors.whole_step.card import Card
    from llmc.runtime.executors.whole_step.layout import CardArray


class CardCache:
    """Of slots of up to `capacity` tokens each, in `dtype` where a tensor has none of its own. `arrays` says what lies
    there; `tensors`, one for each, are none until `make`."""

    def __init__(self, card: Card, shape: CacheShape, capacity: int, dtype: Dtype) -> None:
        self._card, self._shape = card, shape
        self.arrays = arrays_of(shape, capacity, dtype)
        self.lengths = lengths_of(self.arrays)
        self.tensors: list[Any] = []

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: all its tokens, and its states."""
        return sum(array.slot_bytes for array in self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes on the card."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def make(self, slots: int) -> None:
        """An empty cache; what was there is kept where there is no room."""
        with self._guarded():
            self.tensors = [torch_zeros(array, slots, self._card.device) for array in self.arrays]
        self._card.mark_step()

    def warm(self) -> None:
        """Let slots be copied, read and written once, so that nothing is compiled for that later."""
        self.copy(0, 0)
        self._write(0, self._read(0))

    def drop(self) -> None:
        """Give the memory back."""
        self.tensors = []

    def copy(self, source: int, target: int, length: int = 0) -> None:
        """Make slot `target` what slot `source` is, of any length."""
        del length
        with self._guarded():
            for tensor in self.tensors:
                row = tensor.index_select(1, self._index(source))
                tensor.index_copy_(1, self._index(target), row)
        self._card.mark_step()

    def read(self, slot: int, length: int) -> list[Array]:
        """As `TorchCache.read`."""
        held = self._tensors(self._read(slot))
        return [read_tensor(t, each, length) for t, each in zip(self._shape, held, strict=True)]

    def write(self, slot: int, length: int, prefix: Sequence[Array]) -> None:
        """As `TorchCache.write`, with zeros behind the tokens."""
        rows = [torch_zeros(array, 1).squeeze(1) for array in self.arrays]
        for t, each, given in zip(self._shape, self._tensors(rows), prefix, strict=True):
            write_tensor(t, each, length, given)
        self._write(slot, rows)

    def poison(self, slot: int, start: int, value: float, used: int = 0) -> None:
        """As `TorchCache.poison`."""
        rows = self._read(slot)
        for t, each in zip(self._shape, self._tensors(rows), strict=True):
            poison_tensor(t, each, start, value, used)
        self._write(slot, rows)

    def _tensors(self, rows: Sequence[Any]) -> list[Any]:
        """Of a slot's part of each array views of each tensor, as torch/cache.py has them, in the shape's order."""
        found: dict[int, Any] = {}
        for array, row in zip(self.arrays, rows, strict=True):
            found |= zip(array.members, row.transpose(1, 2) if array.kind == "kv" else row, strict=True)
        return [found[i] for i in range(len(found))]

    def _read(self, slot: int) -> list[Any]:
        """A slot on the host, of each array [tensors, …]: copies."""
        with self._guarded():
            rows = [tensor.index_select(1, self._index(slot)).cpu().squeeze(1) for tensor in self.tensors]
        return [row.clone() for row in rows]  # those that may be written to

    def _write(self, slot: int, rows: Sequence[Any]) -> None:
        with self._guarded():
            for tensor, row in zip(self.tensors, rows, strict=True):
                tensor.index_copy_(1, self._index(slot), self._card.put(row.unsqueeze(1)))
        self._card.mark_step()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        import torch

        with self._card.guarded(), torch.inference_mode():
            yield

    def _index(self, slot: int) -> Any:
        import torch

        return self._card.put(torch.tensor([slot]))


def torch_zeros(array: CardArray, slots: int, device: Any = "cpu") -> Any:
    """An empty array of so many slots."""
    import torch

    return torch.zeros(array.size(slots), dtype=getattr(torch, DTYPES[array.dtype]), device=device)
