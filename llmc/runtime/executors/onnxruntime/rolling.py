"""Rings for an attention operator that reads a cache from its first place on: the tokens in it move down.

ONNX Runtime's GroupQueryAttention takes the tokens of a row end to end. So a ring has more places than the manifest
says (`rolling_ring`), and token p lies at place p − starts[row]. When a step does not fit, the tokens that the ring has
to hold move to its beginning, once in ROLLING_ROOM tokens or less often. Graphs take the starts as inputs: rotations
know positions, the operator knows places.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.executors.slot_tensors import TensorPart, Tensors
from llmc.runtime.host import rolling_ring

STARTS = "first_token_"
"""Before a window: the graphs' input that says at which token of each row caches of that window begin, [B] int64."""


class RollingTensors(Tensors):
    """Tensors whose rings lie so; before a step writes, `make_room`."""

    def _lay_out(self, slots: int, length: int, query: int) -> None:
        self.parts = tuple(_rolling(part, query) for part in self._held)
        rings = [(held.like, part.like.ring) for held, part in zip(self._held, self.parts, strict=True)]
        self._rings = {t.window: (t.ring, places) for t, places in rings if t.ring is not None and places is not None}
        self._starts = {window: np.zeros(slots, np.int64) for window in self._rings}
        super()._lay_out(slots, length, query)

    def starts(self, window: int) -> NDArray[np.int64]:
        """The token at the first place of each row's rings of that window; zeros where there are none."""
        found = self._starts.get(window)
        return super().starts(window) if found is None else found

    def make_room(self, row: int, past: int, end: int) -> int:
        """Where more than a ring's spare places are new, nothing that was there is kept."""
        if any(end - past > places - ring for ring, places in self._rings.values()):
            past = 0
        for window, (ring, places) in self._rings.items():
            starts = self._starts[window]
            start = int(starts[row]) if past else 0
            first = start
            if end - start > places:
                first = past - ring + 1 if past else end - places
            if past and first > start:
                self._move(window, row, first - start, past - start)
            starts[row] = first
        return past

    def _move(self, window: int | None, row: int, begin: int, end: int) -> None:
        for part, array in zip(self.parts, self.arrays, strict=True):
            if part.like.window == window:
                array[:, row, :, : end - begin] = array[:, row, :, begin:end].copy()

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Wherever its tokens start."""
        super().copy_row(source, target, length)
        for starts in self._starts.values():
            starts[target] = starts[source] if length else 0

    def begin(self, part: TensorPart, row: int, first: int) -> None:
        """What is before it would be read as if it were there."""
        if part.like.window in self._starts:
            self._starts[part.like.window][row] = first

    def first(self, part: TensorPart, row: int, end: int) -> int:
        """The token at its first place."""
        return 0 if part.like.ring is None else int(self._starts[part.like.window][row])

    def places(self, part: TensorPart, row: int, start: int, end: int) -> slice:
        """They follow each other."""
        first = self.first(part, row, end)
        return slice(start - first, end - first)

    def free(self, part: TensorPart, row: int, start: int, used: int) -> NDArray[np.int64]:
        """Those behind them."""
        return np.arange(max(0, start - self.first(part, row, used)), part.like.places(self.length))


def _rolling(part: TensorPart, query: int) -> TensorPart:
    ring = part.like.ring
    return part if ring is None else part._replace(like=replace(part.like, ring=rolling_ring(ring, query)))
