"""Recurrent states of a paged cache, each in the table that OpenVINO's operators read and write, one row per slot.

    layout    a row of the table    of a state `shape`
    conv      [C, K]                [K − 1, C], the tokens before a step, after a column that is not read
    delta     [H, Dv, Dk]           [H, Dk, Dv]
    scan      [H, P, N]             the same
    columns   [N, C]                [C, 1, N]

After the rows of slots come a row of zeros, with which rows without a past begin, and rows that no slot owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.executors.slots import sparse_bytes

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape, CacheTensor

Floats = NDArray[np.float32]
Shape = tuple[int, ...]


class _Layout(NamedTuple):
    """The shape of a row, and its conversions to and from a state."""

    row: Callable[[Shape], Shape]
    read: Callable[[Floats], Floats]
    written: Callable[[Floats], Floats]


def _with_column(state: Floats) -> Floats:
    return np.concatenate([np.zeros_like(state[:1]), state]).T


LAYOUTS: Mapping[str, _Layout] = {
    "conv": _Layout(lambda s: (s[1], s[0] + 1), lambda row: row[:, 1:].T, _with_column),
    "delta": _Layout(lambda s: (s[0], s[2], s[1]), lambda row: row.swapaxes(1, 2), lambda state: state.swapaxes(1, 2)),
    "scan": _Layout(lambda s: s, lambda row: row, lambda state: state),
    "columns": _Layout(lambda s: (s[2], s[0]), lambda row: row.T[:, None], lambda state: state[:, 0].T),
}
"""By name, as in model inputs: conv_state.0."""


def layouts_of(rows: Mapping[str, Shape], shape: CacheShape) -> list[str]:
    """The layout of each state of `shape`, by the model inputs that are tables and their row shapes.

    Raises ValueError if these belong to other states.
    """
    found = {name: name.partition("_state.")[0] for name in rows}
    layouts = [next((n for n in found if n.endswith(f"_state.{i}")), "") for i in range(len(shape.states))]
    wanted = {
        name: LAYOUTS[found[name]].row(t.shape)
        for name, t in zip(layouts, shape.states, strict=True)
        if found.get(name) in LAYOUTS
    }
    if wanted != rows or len(wanted) != len(shape.states):
        raise ValueError(f"tables {rows} are not of the states {[t.entry for t in shape.states]}")
    return [found[name] for name in layouts]


class StateTables:
    """The states `kept` of `slots` slots, in `layouts`, and `more` rows of no slot. Memory is allocated on write."""

    def __init__(self, kept: Sequence[CacheTensor], layouts: Sequence[str], slots: int, more: int) -> None:
        self._layouts = [LAYOUTS[name] for name in layouts]
        shapes = [layout.row(t.shape) for layout, t in zip(self._layouts, kept, strict=True)]
        self.tables: list[Floats] = [
            sparse_bytes(4 * (slots + 1 + more) * int(np.prod(shape))).view(np.float32).reshape(-1, *shape)
            for shape in shapes
        ]
        self.zeros = slots
        """The row that rows without a past read."""
        self.filler = slots + 1
        """The first row that no slot owns."""
        self.slot_bytes = sum(table[0].nbytes for table in self.tables)

    def copy(self, source: int, target: int) -> None:
        """Copy the states of one slot to another."""
        for table in self.tables:
            table[target] = table[source]

    def read(self, slot: int) -> list[Floats]:
        """Copies of a slot's states, in the shapes of the cache's shape."""
        return [
            np.ascontiguousarray(layout.read(table[slot]))
            for layout, table in zip(self._layouts, self.tables, strict=True)
        ]

    def write(self, slot: int, states: Sequence[Floats]) -> None:
        """Set a slot's states, in the shapes of the cache's shape."""
        for layout, table, state in zip(self._layouts, self.tables, states, strict=True):
            table[slot] = layout.written(state)

    def nan_fill(self, slot: int, value: float) -> None:
        """Fill a slot's states and the rows that no slot owns."""
        for table in self.tables:
            table[slot] = value
            table[self.filler :] = value
