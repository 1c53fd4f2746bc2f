"""The cache on the card, in the arrays of layout.py.

Whatever is asked for runs at shapes that do not depend on lengths, because another shape is another graph to compile:
a slot is copied, read and written whole. Each raises OutOfDeviceMemoryError where the card has no room for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.executors.whole_step.layout import DTYPES

if TYPE_CHECKING:
    from llmc.runtime.executors.whole_step.card import Card
    from llmc.runtime.executors.whole_step.layout import CardArray

Array = NDArray[np.float32]


class CardCache:
    """`arrays` says what lies there; `tensors`, one for each, are none until `make`."""

    def __init__(self, card: Card, arrays: Sequence[CardArray]) -> None:
        self._card = card
        self.arrays = tuple(arrays)
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
        import torch

        with self._guarded():
            self.tensors = [
                torch.zeros(array.size(slots), dtype=getattr(torch, DTYPES[array.dtype]), device=self._card.device)
                for array in self.arrays
            ]
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
        """A slot's first tokens, keys and values as [heads, length, width], and its states, on the host."""
        found: dict[int, Array] = {}
        for array, row in zip(self.arrays, self._read(slot), strict=True):
            cut = row[:, :length].transpose(1, 2) if array.kind == "kv" else row
            found |= zip(array.members, (np.array(tensor.float().numpy()) for tensor in cut), strict=True)
        return [found[i] for i in range(len(found))]

    def write(self, slot: int, length: int, prefix: Sequence[Array]) -> None:
        """Put what `read` gave into a slot, rounded to the cache's dtypes; zeros behind its tokens."""
        import torch

        rows = []
        for array in self.arrays:
            row = torch.zeros((len(array.members), *array.of_slot), dtype=getattr(torch, DTYPES[array.dtype]))
            given = torch.from_numpy(np.stack([prefix[i] for i in array.members]))
            if array.kind == "kv":
                row[:, :length] = given.transpose(1, 2)
            else:
                row.copy_(given)
            rows.append(row)
        self._write(slot, rows)

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite a slot from token `start` on; at 0 its states too, which no token owns then."""
        rows = self._read(slot)
        for array, row in zip(self.arrays, rows, strict=True):
            if array.kind == "kv":
                row[:, start:] = value
            elif start == 0:
                row.fill_(value)
        self._write(slot, rows)

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
