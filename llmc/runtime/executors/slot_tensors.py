"""Keys and values in buffers of numpy, laid out anew in rows of any length.

A ring (runtime/cache_shape.py) has the same places in every layout, as far as it is that long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.executors.places import free_places, places_of
from llmc.runtime.executors.sparse import sparse_bytes

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape, CacheTensor

Array = NDArray[np.float32]


class TensorPart(NamedTuple):
    """So many tensors like one."""

    tensors: int
    like: CacheTensor

    @property
    def token_values(self) -> int:
        """Numbers of a token."""
        return self.tensors * self.like.values

    @property
    def unrolled(self) -> TensorPart:
        """With a place for every token."""
        return self._replace(like=replace(self.like, ring=None))


def parts_of(shape: CacheShape) -> tuple[TensorPart, ...]:
    """Keys and values of `shape` in order: all together where they are of one size, else each for itself."""
    if shape.uniform is not None:
        return (TensorPart(len(shape), shape.tensors[0]),)
    return tuple(TensorPart(1, t) for t in shape.kv)


class Tensors:
    """Keys and values, each part in one buffer: `arrays` [tensors, slots, heads, length, width], of a ring its places.

    Buffers have room for `places` tokens of all slots together, and never move. `sparse`: they take memory as tokens
    come, for a cache of which little is used.
    """

    def __init__(
        self, parts: Sequence[TensorPart], places: int, sparse: bool = False, dtype: type = np.float32
    ) -> None:  # fmt: skip
        self._held = self.parts = tuple(parts)
        self._buffers = [_buffer(part.token_values * places, sparse, dtype) for part in parts]
        self._fill: float | None = None
        self.slots = 0
        """Rows."""
        self.length = 0
        """Tokens of a row."""
        self.query = 0
        """How many of them a step adds at most."""
        self.nbytes = 0
        """Bytes that layouts ever took; the rest of the buffers is address space without memory."""
        self.arrays: list[Array] = []
        self._lay_out(0, 0, 1)

    @property
    def array(self) -> Array:
        """The only part of a cache whose tensors are of one size."""
        (array,) = self.arrays
        return array

    def rows(self, first: int, count: int) -> list[Array]:
        """Views of each tensor's rows, in the order of the cache's keys and values."""
        return [tensor[first : first + count] for array in self.arrays for tensor in array]

    def keeps(self, slots: int, length: int) -> bool:
        """Whether `reserve` of this shape would leave the contents as they are."""
        return (slots, length) == (self.slots, self.length) and self._fill is None

    def reserve(self, slots: int, length: int, query: int = 1) -> None:
        """Take `slots` rows of `length` tokens, to which a step adds up to `query`. Contents are lost, unless that is
        the shape already."""
        if (slots, length, query) != (self.slots, self.length, self.query):
            self._lay_out(slots, length, query)
        if self._fill is not None:
            for array in self.arrays:
                array.fill(self._fill)
            self._fill = None

    def _lay_out(self, slots: int, length: int, query: int) -> None:
        self.slots, self.length, self.query = slots, length, query
        sizes = [(part.tensors, *part.like.size(slots, length)) for part in self.parts]
        self.arrays = [
            buffer[: math.prod(size)].reshape(size) for buffer, size in zip(self._buffers, sizes, strict=True)
        ]
        self.nbytes = max(self.nbytes, sum(array.nbytes for array in self.arrays))

    def nbytes_of(self, tokens: int) -> int:
        """Bytes of what a row of `tokens` tokens takes."""
        return sum(
            part.token_values * part.like.places(tokens) * array.itemsize
            for part, array in zip(self.parts, self.arrays, strict=True)
        )

    def numbers(self, held: NDArray[Any]) -> Array:
        """Copies in float32 of what arrays hold, [.., width]."""
        return held.astype(np.float32)

    def held(self, numbers: Array) -> NDArray[Any]:
        """Numbers [.., width] as arrays take them."""
        return numbers

    def filling(self, part: TensorPart, value: float) -> NDArray[Any]:
        """What fills a place of a part with one number."""
        return np.array(value, np.float32)

    def starts(self, window: int) -> NDArray[np.int64]:
        """The token at the first place of each row's rings of that window."""
        return np.zeros(self.slots, np.int64)

    def make_room(self, row: int, past: int, end: int) -> int:
        """Let tokens `past` … `end` − 1 of a row have places behind earlier ones. Returns how many tokens it still has:
        `past`, or none, where it has to be filled anew."""
        return past

    def begin(self, part: TensorPart, row: int, first: int) -> None:
        """Let a row that is filled anew have no token before `first`."""

    def first(self, part: TensorPart, row: int, end: int) -> int:
        """The first token that a row of `end` tokens has."""
        return max(0, end - part.like.places(end))

    def places(self, part: TensorPart, row: int, start: int, end: int) -> slice | NDArray[np.int64]:
        """Where a row has tokens, from `first` on."""
        return places_of(part.like, start, end)

    def free(self, part: TensorPart, row: int, start: int, used: int) -> NDArray[np.int64]:
        """Where a row has none of the first `start` tokens, of `used` that it has held."""
        return free_places(part.like.places(self.length), start, used)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of one row another's."""
        for part, array in zip(self.parts, self.arrays, strict=True):
            array[:, target, :, : part.like.places(length)] = array[:, source, :, : part.like.places(length)]

    def poison(self, value: float) -> None:
        """Let the next `reserve` fill everything with `value`."""
        self._fill = value


def _buffer(count: int, sparse: bool, dtype: type) -> Array:
    made: Array = (
        sparse_bytes(count * np.dtype(dtype).itemsize).view(dtype) if sparse and count else np.zeros(count, dtype)
    )
    return made
