"""Rings for an attention operator that reads a cache from its first place on: the tokens in it move down.

ONNX Runtime's GroupQueryAttention takes the tokens of a row end to end. So a ring has ROLLING_ROOM places more than the
manifest says, and token p lies at place p − starts[slot]. When a step does not fit, the tokens that the ring has to
hold move to its beginning, once in ROLLING_ROOM tokens or less often. Graphs take the starts as inputs: rotations know
positions, the operator knows places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.executors.held import Held
from llmc.runtime.executors.slot_cache import Part, SlotCache
from llmc.runtime.host import ROLLING_ROOM

STARTS = "first_token_"
"""Before a window: the graphs' input that says at which token of each row caches of that window begin, [B] int64."""


class RollingCache(SlotCache):
    """A SlotCache of homes alone; before a step writes, `make_room`."""

    def __init__(self, shape: CacheShape, slots: int, capacity: int) -> None:
        wider = tuple(t if t.ring is None else replace(t, ring=t.ring + ROLLING_ROOM) for t in shape)
        super().__init__(CacheShape(shape.layers, wider), slots, capacity)
        self.held = Held(slots, shape.rewind)
        self._starts = {window: np.zeros(slots, np.int64) for window, _ in shape.rewind.rings}
        self._rings = dict(shape.rewind.rings)

    def starts(self, window: int) -> NDArray[np.int64]:
        """The token at the first place of each slot's rings of that window; zeros where there are none."""
        found = self._starts.get(window)
        return np.zeros(len(self.held.used), np.int64) if found is None else found

    def make_room(self, slot: int, past: int, end: int) -> None:
        """Let tokens `past` … `end` − 1, at most ROLLING_ROOM unless `past` is 0, have places behind earlier ones."""
        for window, ring in self._rings.items():
            starts = self._starts[window]
            if past == 0:
                starts[slot] = 0
            start = int(starts[slot])
            if end - start <= ring + ROLLING_ROOM:
                continue
            first = max(past - ring + 1, end - ring - ROLLING_ROOM if past == 0 else 0)
            for part, array in zip(self._parts, self.home.arrays, strict=True):
                if past and part.like.window == window:
                    array[:, slot, :, : past - first] = array[:, slot, :, first - start : past - start].copy()
            starts[slot] = first

    def write(self, slot: int, start: int, end: int, new: Sequence[NDArray[np.float32]]) -> None:
        """Make room first."""
        self.held.require(slot, start)
        self.make_room(slot, start, end)
        super().write(slot, start, end, new)

    def copy(self, source: int, target: int, length: int) -> None:
        """The places of the first `length` tokens, wherever they start."""
        super().copy(source, target, length)
        for starts in self._starts.values():
            starts[target] = starts[source] if length else 0

    def _places(self, part: Part, slot: int, start: int, end: int) -> slice | NDArray[np.int64]:
        if part.like.ring is None:
            return slice(start, end)
        first = int(self.starts(part.like.window or 0)[slot])
        return slice(max(start, end - part.like.ring) - first, end - first)

    def _free(self, part: Part, slot: int, start: int, used: int) -> NDArray[np.int64]:
        if part.like.ring is None:
            return super()._free(part, slot, start, used)
        first = int(self.starts(part.like.window or 0)[slot])
        return np.arange(max(0, start - first), part.like.ring)
