"""The contents of cache slots: how many tokens, at which offsets, in lazily allocated memory.

A tensor has one token slot per token, or those of a ring buffer (runtime/cache_shape.py). Arrays are [..., token slots,
width].
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheTensor, Rewind
    from llmc.runtime.step import Step


class SlotLengths:
    """`used`: tokens of each slot. `floor`: the lowest start of a step in it, other than 0, by `rewind`."""

    def __init__(self, slots: int, rewind: Rewind) -> None:
        self._rewind = rewind
        self.used = [0] * slots
        self.floor = [0] * slots

    def require(self, slot: int, length: int) -> None:
        """Raise InputError unless the first `length` tokens of a slot can be used without the later ones."""
        used, floor = self.used[slot], self.floor[slot]
        if length > used:
            raise InputError(f"slot {slot} holds {used} tokens, not {length}")
        if 0 < length < floor:
            what = "the states" if self._rewind.states else "its windows"
            raise InputError(
                f"slot {slot} holds {what} after {used} tokens, which cannot be taken back to {length} tokens"
            )

    def first(self, slot: int, t: CacheTensor) -> int:
        """The first token of a slot that a step may still see in a tensor of kind kv."""
        return 0 if t.ring is None or t.window is None else max(0, self.floor[slot] - t.window + 1)

    def wrote(self, slot: int, start: int, end: int) -> None:
        """Record that tokens `start` … `end` − 1 were written to a slot, as its last."""
        floor = self._rewind.floor(end)
        self.floor[slot] = max(self.floor[slot], floor) if start else floor
        self.used[slot] = end

    def ran(self, step: Step) -> None:
        for row, slot in enumerate(step.slots):
            start = int(step.past_lengths[row])
            self.wrote(slot, start, start + int(step.new_lengths[row]))

    def copied(self, source: int, target: int, length: int) -> None:
        """Record that slot `target` holds the first `length` tokens of slot `source`, and no others."""
        self.floor[target] = self.floor[source] if length else 0
        self.used[target] = length

    def imported(self, slot: int, length: int) -> None:
        """Record that a slot holds `length` tokens of another executor, with only their windows."""
        self.floor[slot] = 0 if self._rewind.free else length
        self.used[slot] = length


def slots_in(tokens: int, capacity: int) -> int:
    """The number of whole sequences of `capacity` tokens in a cache of `tokens`. Raises InputError for none."""
    if tokens < capacity:
        raise InputError(
            f"a KV cache of {tokens} tokens holds no sequence of {capacity}; leave more memory to it: lower "
            "--graph-reserved-mem, or plan for a shorter --max-model-len"
        )
    return tokens // capacity


def offsets_of(t: CacheTensor, start: int, end: int) -> slice | NDArray[np.int64]:
    """Offsets of tokens `start` … `end` − 1 in order, or of the last of them in a ring buffer."""
    return slice(start, end) if t.ring is None else np.arange(max(start, end - t.ring), end) % t.ring


def free_offsets(offsets: int, start: int, used: int) -> NDArray[np.int64]:
    """Of a slot's `offsets`, those that hold none of the first `start` tokens, after it has held `used` tokens."""
    return np.arange(start, min(max(used, offsets), start + offsets)) % offsets


def windows(
    t: CacheTensor, held: NDArray[Any], length: int, offsets: slice | NDArray[np.int64] | None = None
) -> NDArray[Any]:
    """A view of a slot's first `length` tokens [..., length, width], or of a ring's tokens that later steps see, else
    0.
    """
    if t.ring is None:
        return held[..., :length, :]
    first = t.seen(length).start
    found = np.zeros((*held.shape[:-2], length, held.shape[-1]), held.dtype)
    found[..., first:, :] = held[..., offsets_of(t, first, length) if offsets is None else offsets, :]
    return found


def sparse_bytes(count: int) -> NDArray[np.uint8]:
    """`count` zero bytes whose memory is allocated page by page.

    numpy requests huge pages, each of which is cleared from its first token on: for slots of a hundred tokens in a
    cache for two thousand, twenty times the memory, and the first prefill takes a second longer.
    """
    pages = mmap.mmap(-1, max(1, count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:count]
