"""The KV cache on the card: one tensor [2 · layers, slots, capacity, kv_heads, head_dim].

Whatever is asked for runs at shapes that do not depend on lengths, because another shape is another graph to compile:
a slot is copied, read and written whole. Each raises OutOfDeviceMemoryError where the card has no room for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.executors.whole_step.card import Card


class CardCache:
    """`sizes` are tensors (two a layer), kv_heads and head_dim; `tensor` is None until `make`."""

    def __init__(self, card: Card, sizes: tuple[int, int, int], capacity: int, dtype: Any) -> None:
        self._card, self._sizes, self._capacity, self._dtype = card, sizes, capacity, dtype
        self.tensor: Any = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        tensors, heads, head_dim = self._sizes
        return tensors * heads * head_dim * int(self._dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes on the card."""
        return 0 if self.tensor is None else int(self.tensor.numel() * self.tensor.element_size())

    def make(self, slots: int) -> None:
        """An empty cache; what was there is kept where there is no room."""
        import torch

        tensors, heads, head_dim = self._sizes
        with self._guarded():
            self.tensor = torch.zeros(
                (tensors, slots, self._capacity, heads, head_dim), dtype=self._dtype, device=self._card.device
            )
        self._card.mark_step()

    def drop(self) -> None:
        """Give the memory back."""
        self.tensor = None

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` what slot `source` is."""
        with self._guarded():
            rows = self.tensor.index_select(1, self._index(source))
            self.tensor.index_copy_(1, self._index(target), rows)
        self._card.mark_step()

    def read(self, slot: int) -> Any:
        """A slot on the host, [2 · layers, capacity, kv_heads, head_dim]."""
        with self._guarded():
            row = self.tensor.index_select(1, self._index(slot)).cpu().squeeze(1)
        return row.clone()  # one that may be written to

    def write(self, slot: int, row: Any) -> None:
        """Put what `read` gave, or such a tensor, into a slot."""
        with self._guarded():
            self.tensor.index_copy_(1, self._index(slot), self._card.put(row.to(self._dtype).unsqueeze(1)))
        self._card.mark_step()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        import torch

        with self._card.guarded(), torch.inference_mode():
            yield

    def _index(self, slot: int) -> Any:
        import torch

        return self._card.put(torch.tensor([slot]))
