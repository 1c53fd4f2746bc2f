"""The cache as torch tensors on the host: one for each tensor of its shape (runtime/cache_shape.py), by slot.

Keys and values are [slots, heads, capacity, width], states [slots, *shape].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape
    from llmc.runtime.step import Step

Array = NDArray[np.float32]
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


class TorchCache:
    """Of `slots` sequences of up to `capacity` tokens each, in torch's `dtype` where a tensor has none of its own."""

    def __init__(self, shape: CacheShape, slots: int, capacity: int, dtype: Any) -> None:
        import torch

        self._torch, self._shape, self._slots = torch, shape, slots
        self._kept = [
            torch.zeros(t.size(slots, capacity), dtype=dtype if t.dtype is None else getattr(torch, _DTYPES[t.dtype]))
            for t in shape
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(kept.numel() * kept.element_size() for kept in self._kept)

    def past(self, step: Step) -> list[Any]:
        """What a step's rows have: the first `context` tokens, and states. Views where the slots follow each other."""
        first = step.slots[0] if step.slots else 0
        together = step.slots == tuple(range(first, first + len(step.slots)))
        if together and first + step.batch <= self._slots:
            rows: Any = slice(first, first + step.batch)
        else:
            rows = list(step.slots) + [0] * (step.batch - len(step.slots))
        return [
            kept[rows, :, : step.context] if t.kind == "kv" else kept[rows]
            for t, kept in zip(self._shape, self._kept, strict=True)
        ]

    def append(self, step: Step, new: Sequence[Any]) -> None:
        """Keep the live rows' live tokens and their states, and nothing else."""
        torch = self._torch
        live = np.array(step.slots, np.int64)
        counts = step.new_lengths[: len(live)]
        rows = np.repeat(np.arange(len(live)), counts)
        columns = np.concatenate([np.arange(n) for n in counts] or [np.zeros(0, np.int64)])
        slots, places = torch.from_numpy(live[rows]), torch.from_numpy(step.past_lengths[rows] + columns)
        rows_t, columns_t = torch.from_numpy(rows), torch.from_numpy(columns)
        for t, kept, tensor in zip(self._shape, self._kept, new, strict=True):
            if t.kind == "kv":
                kept[slots, :, places] = tensor[rows_t, :, columns_t]
            else:
                kept[torch.from_numpy(live)] = tensor[: len(live)].to(kept.dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        """Let slot `target` begin as slot `source` does."""
        for t, kept in zip(self._shape, self._kept, strict=True):
            if t.kind == "kv":
                kept[target, :, :length] = kept[source, :, :length]
            else:
                kept[target] = kept[source]

    def read(self, slot: int, length: int) -> list[Array]:
        """Copies of a slot's first tokens, and of its states, in float32."""
        return [
            np.array((kept[slot, :, :length] if t.kind == "kv" else kept[slot]).float().numpy())
            for t, kept in zip(self._shape, self._kept, strict=True)
        ]

    def write(self, slot: int, length: int, prefix: Sequence[Array]) -> None:
        """Put what `read` gave into a slot, rounded to the cache's dtype."""
        for t, kept, array in zip(self._shape, self._kept, prefix, strict=True):
            given = self._torch.from_numpy(np.array(array, np.float32))
            if t.kind == "kv":
                kept[slot, :, :length] = given
            else:
                kept[slot] = given

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite a slot from token `start` on; at 0 its states too, which no token owns then."""
        for t, kept in zip(self._shape, self._kept, strict=True):
            if t.kind == "kv":
                kept[slot, :, start:] = value
            elif start == 0:
                kept[slot] = value

    def drop(self) -> None:
        """Give the memory back."""
        self._kept = [kept.new_empty(0) for kept in self._kept]
