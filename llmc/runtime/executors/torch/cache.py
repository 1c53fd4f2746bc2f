"""The cache as torch tensors on the host, one for each tensor of its shape (runtime/cache_shape.py).

Keys and values are [slots, heads, token slots, width], states [slots, *shape].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.executors.slots import free_offsets, windows

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape, CacheTensor
    from llmc.runtime.step import Step

Array = NDArray[np.float32]
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


class TorchCache:
    """The cache of `slots` sequences of up to `capacity` tokens, in torch's `dtype` unless a tensor has its own."""

    def __init__(self, shape: CacheShape, slots: int, capacity: int, dtype: Any) -> None:
        import torch

        self._torch, self._shape, self._slots, self._capacity = torch, shape, slots, capacity
        self._kept = [
            torch.zeros(t.size(slots, capacity), dtype=dtype if t.dtype is None else getattr(torch, _DTYPES[t.dtype]))
            for t in shape
        ]

    @property
    def nbytes(self) -> int:
        return sum(kept.numel() * kept.element_size() for kept in self._kept)

    def past(self, step: Step) -> list[Any]:
        """A step's inputs: the first `context` tokens of its rows, and states. Views if the slots are consecutive."""
        first = step.slots[0] if step.slots else 0
        together = step.slots == tuple(range(first, first + len(step.slots)))
        if together and first + step.batch <= self._slots:
            rows: Any = slice(first, first + step.batch)
        else:
            rows = list(step.slots) + [0] * (step.batch - len(step.slots))
        return [
            kept[rows, :, : t.token_slots(step.context)] if t.kind == "kv" else kept[rows]
            for t, kept in zip(self._shape, self._kept, strict=True)
        ]

    def append(self, step: Step, new: Sequence[Any]) -> None:
        torch = self._torch
        live = np.array(step.slots, np.int64)
        counts = step.new_lengths[: len(live)]
        rows = np.repeat(np.arange(len(live)), counts)
        columns = np.concatenate([np.arange(n) for n in counts] or [np.zeros(0, np.int64)])
        for t, kept, tensor in zip(self._shape, self._kept, new, strict=True):
            if t.kind == "kv":
                token_slots = t.token_slots(self._capacity)
                last = columns >= counts[rows] - token_slots  # of two tokens in one token slot, the last
                r, c = rows[last], columns[last]
                at = (step.past_lengths[r] + c) % token_slots
                kept[torch.from_numpy(live[r]), :, torch.from_numpy(at)] = tensor[
                    torch.from_numpy(r), :, torch.from_numpy(c)
                ]
            else:
                kept[torch.from_numpy(live)] = tensor[: len(live)].to(kept.dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        for t, kept in zip(self._shape, self._kept, strict=True):
            if t.kind == "kv":
                kept[target, :, : t.token_slots(length)] = kept[source, :, : t.token_slots(length)]
            else:
                kept[target] = kept[source]

    def read(self, slot: int, length: int) -> list[Array]:
        """Float32 copies of a slot's first tokens, zeros before a ring buffer's last window, and of its states."""
        return [read_tensor(t, kept[slot], length) for t, kept in zip(self._shape, self._kept, strict=True)]

    def write(self, slot: int, length: int, prefix: Sequence[Array]) -> None:
        """Write the result of `read` to a slot, rounded to the cache's dtype."""
        for t, kept, array in zip(self._shape, self._kept, prefix, strict=True):
            write_tensor(t, kept[slot], length, array)

    def nan_fill(self, slot: int, start: int, value: float, used: int = 0) -> None:
        """Fill a slot that has held `used` tokens from token `start` on; at 0 also its states."""
        for t, kept in zip(self._shape, self._kept, strict=True):
            nan_fill_tensor(t, kept[slot], start, value, used)

    def drop(self) -> None:
        self._kept = [kept.new_empty(0) for kept in self._kept]


def read_tensor(t: CacheTensor, held: Any, length: int) -> Array:
    """Read one tensor for `TorchCache.read`. `held` is a slot's part: [heads, token slots, width], or a state."""
    if t.kind == "state":
        return np.array(held.float().numpy())
    return np.array(windows(t, held[:, : t.token_slots(length)].float().numpy(), length))


def write_tensor(t: CacheTensor, held: Any, length: int, array: Array) -> None:
    """Write one tensor for `TorchCache.write`."""
    import torch

    given = torch.from_numpy(np.array(array, np.float32)).to(held.dtype)
    if t.kind == "state":
        held.copy_(given)
        return
    token_slots = held.shape[1]
    tokens = np.arange(max(0, length - token_slots), length)
    held[:, tokens % token_slots] = given[:, tokens]


def nan_fill_tensor(t: CacheTensor, held: Any, start: int, value: float, used: int) -> None:
    """Fill one tensor for `TorchCache.nan_fill`."""
    if t.kind == "kv":
        held[:, free_offsets(held.shape[1], start, used)] = value
    elif start == 0:
        held.fill_(value)
