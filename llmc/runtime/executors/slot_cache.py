"""KV caches for attention that updates them in place, in layouts fixed by compiled graphs.

A decode graph with static shapes takes the first rows of a cache exactly as long as its bucket, and writes to every
row, including dummy rows. All slots' tokens are therefore kept in a `home` of full length, and a slot is laid out a
second time in the decode cache while it decodes. Both copies are lazy: tokens that decode added are copied home when
another layout, a dummy row, a copy, an export or a prefill needs them, and back when the slot decodes again. A
recurrent state, which has no length, is only at home. A ring buffer (runtime/cache_shape.py) stores its tokens at equal
offsets in every layout, as far as it is that long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.executors.base import Executor
from llmc.runtime.executors.slots import SlotLengths, free_offsets, offsets_of, sparse_bytes, windows

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape, CacheTensor
    from llmc.runtime.step import Step

Array = NDArray[np.float32]


class TensorPart(NamedTuple):
    """Several cache tensors of equal shape."""

    tensors: int
    like: CacheTensor

    @property
    def token_values(self) -> int:
        return self.tensors * self.like.values

    @property
    def unrolled(self) -> TensorPart:
        """The same with one token slot per token."""
        return self._replace(like=replace(self.like, ring=None))


def parts_of(shape: CacheShape) -> tuple[TensorPart, ...]:
    """Keys and values of `shape` in order: as one part if they have one size, otherwise one part each."""
    if shape.uniform is not None:
        return (TensorPart(len(shape), shape.tensors[0]),)
    return tuple(TensorPart(1, t) for t in shape.kv)


class Tensors:
    """Keys and values, each part in one buffer: `arrays` [tensors, slots, heads, length or ring-buffer slots, width].

    Buffers have room for `offsets` tokens of all slots together, and never move. `sparse`: memory is allocated as
    tokens come, for a cache of which little is used.
    """

    def __init__(
        self, parts: Sequence[TensorPart], offsets: int, sparse: bool = False, dtype: type = np.float32
    ) -> None:  # fmt: skip
        self._held = self.parts = tuple(parts)
        self._buffers = [_buffer(part.token_values * offsets, sparse, dtype) for part in parts]
        self._fill: float | None = None
        self.slots = 0
        """Rows."""
        self.length = 0
        """Tokens per row."""
        self.query = 0
        """Largest number of tokens that a step adds to a row."""
        self.nbytes = 0
        """Largest size of a layout so far, in bytes; the rest of the buffers is unallocated address space."""
        self.arrays: list[Array] = []
        self._lay_out(0, 0, 1)

    @property
    def array(self) -> Array:
        """The only part of a cache whose tensors have one size."""
        (array,) = self.arrays
        return array

    def rows(self, first: int, count: int) -> list[Array]:
        """Views of each tensor's rows, in the order of the cache's keys and values."""
        return [tensor[first : first + count] for array in self.arrays for tensor in array]

    def keeps(self, slots: int, length: int) -> bool:
        return (slots, length) == (self.slots, self.length) and self._fill is None

    def reserve(self, slots: int, length: int, query: int = 1) -> None:
        """Lay out `slots` rows of `length` tokens, to which steps add up to `query`. A new shape loses the contents."""
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
        return sum(
            part.token_values * part.like.token_slots(tokens) * array.itemsize
            for part, array in zip(self.parts, self.arrays, strict=True)
        )

    def numbers(self, held: NDArray[Any]) -> Array:
        """Copies in float32 of stored values [.., width]."""
        return held.astype(np.float32)

    def held(self, numbers: Array) -> NDArray[Any]:
        """Values [.., width] in the stored format."""
        return numbers

    def filling(self, part: TensorPart, value: float) -> NDArray[Any]:
        """The stored form of a token slot of a part filled with one value."""
        return np.array(value, np.float32)

    def starts(self, window: int) -> NDArray[np.int64]:
        """The token at the start of each row's ring buffers of that window."""
        return np.zeros(self.slots, np.int64)

    def make_room(self, row: int, past: int, end: int) -> int:
        """Make room for tokens `past` … `end` − 1 of a row. Returns `past`, or 0 if the row must be filled anew."""
        return past

    def begin(self, part: TensorPart, row: int, first: int) -> None:
        """Set the first token, `first`, of a row that is filled anew."""

    def first(self, part: TensorPart, row: int, end: int) -> int:
        """The first token that a row of `end` tokens still has."""
        return max(0, end - part.like.token_slots(end))

    def offsets(self, part: TensorPart, row: int, start: int, end: int) -> slice | NDArray[np.int64]:
        """Offsets of a row's tokens, from `first` on."""
        return offsets_of(part.like, start, end)

    def free(self, part: TensorPart, row: int, start: int, used: int) -> NDArray[np.int64]:
        """Offsets of a row that hold none of the first `start` tokens, among those of the `used` tokens it has held."""
        return free_offsets(part.like.token_slots(self.length), start, used)

    def copy_row(self, source: int, target: int, length: int) -> None:
        for part, array in zip(self.parts, self.arrays, strict=True):
            array[:, target, :, : part.like.token_slots(length)] = array[:, source, :, : part.like.token_slots(length)]

    def nan_fill(self, value: float) -> None:
        """Make the next `reserve` fill everything with `value`."""
        self._fill = value


def _buffer(count: int, sparse: bool, dtype: type) -> Array:
    built: Array = (
        sparse_bytes(count * np.dtype(dtype).itemsize).view(dtype) if sparse and count else np.zeros(count, dtype)
    )
    return built


class SlotCache:
    """The cached tokens of `slots` sequences of up to `capacity` tokens; a step can decode `decode_rows` of them.

    The home holds tokens 0 … at_home[s] − 1 of slot s, its row of the decode cache 0 … in_decode[s] − 1. The longer of
    the two covers the tokens that `held` states. `decode_length` is the longest layout of the decode cache in tokens;
    `home_kind` and `decode_kind` are the two storage classes. `states` has the recurrent states of all slots, [slots,
    *shape] each, in the cache's order.
    """

    def __init__(
        self, shape: CacheShape, slots: int, capacity: int, decode_rows: int = 0, decode_length: int = 0,
        dtype: type = np.float32, home_kind: type[Tensors] = Tensors, decode_kind: type[Tensors] = Tensors,
    ) -> None:  # fmt: skip
        parts = parts_of(shape)
        self.home = home_kind(parts, slots * capacity, sparse=True, dtype=dtype)
        self.home.reserve(slots, capacity)
        self.decode = decode_kind(parts, decode_rows * decode_length)
        self.states: list[Array] = [np.zeros(t.size(slots, 0), np.float32) for t in shape.states]
        self.held = SlotLengths(slots, shape.rewind)
        self._at_home = [0] * slots
        self._in_decode = [0] * decode_rows
        self._rows = decode_rows
        self._touched = [0] * slots

    @property
    def nbytes(self) -> int:
        """Bytes of the decode cache, of the home as far as ever written (each slot's longest), and of states."""
        states = sum(state.nbytes for state in self.states)
        return self.decode.nbytes + sum(map(self.home.nbytes_of, self._touched)) + states

    def read(self, slot: int, length: int) -> list[Array]:
        """Float32 copies of a slot's first `length` tokens, each part [tensors, heads, length, width]; 0 before a
        ring's window.
        """
        self.held.require(slot, length)
        self._bring_home(slot, length)
        found = []
        for part, array in zip(self.home.parts, self.home.arrays, strict=True):
            offsets = self.home.offsets(part, slot, part.like.seen(length).start, length)
            found.append(self.home.numbers(windows(part.like, array[:, slot], length, offsets)))
        return found

    def lay_out(self, slot: int, length: int, to: Tensors, row: int) -> None:
        self.held.require(slot, length)
        self._bring_home(slot, length)
        self._copy_tokens(self.home, slot, to, row, 0, length)

    def write(self, slot: int, start: int, end: int, new: Sequence[Array]) -> None:
        """Write parts `new`, [tensors, heads, end - start, width], to a slot at `start`; it then ends at `end`."""
        self.held.require(slot, start)
        self._bring_home(slot, start)
        self.home.make_room(slot, start, end)
        for part, array, tokens in zip(self.home.parts, self.home.arrays, new, strict=True):
            first = max(start, self.home.first(part, slot, end))
            offsets = self.home.offsets(part, slot, first, end)
            array[:, slot][:, :, offsets] = self.home.held(tokens[:, :, first - start :])
        self._wrote_home(slot, start, end)

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens and the states of slot `source` the whole content of slot `target`."""
        self.held.require(source, length)
        self._bring_home(source, length)
        if source != target:
            self.home.copy_row(source, target, length)
            for state in self.states:
                state[target] = state[source]
        self._wrote_home(target, 0 if source != target else length, length)
        self.held.copied(source, target, length)

    def read_states(self, step: Step, given: Sequence[Array]) -> None:
        """Copy the states of a step's live rows' slots into the first rows of `given` [B, *shape]."""
        for array, state in zip(given, self.states, strict=True):
            array[: len(step.slots)] = state[list(step.slots)]

    def keep_states(self, step: Step, new: Sequence[Array]) -> None:
        """Store a step's new states [B, *shape] in its live rows' slots; dummy rows' states are dropped."""
        for state, built in zip(self.states, new, strict=True):
            state[list(step.slots)] = built[: len(step.slots)]

    def begin_decode(self, step: Step) -> Tensors:
        """Lay out the decode cache for a step over the first slots, with its live rows loaded; dummy rows cover nothing
        needed.
        """
        length = step.context + 1
        if not self.decode.keeps(self._rows, length):
            self._empty(range(self._rows))
            self.decode.reserve(self._rows, length)
        self._empty(range(len(step.slots), step.batch))
        for row, past in enumerate(map(int, step.past_lengths)):  # 0 of dummy rows
            there = self.decode.make_room(row, min(past, self._in_decode[row]), past + 1)
            if there < past:
                self._copy_tokens(self.home, row, self.decode, row, there, past)
        return self.decode

    def end_decode(self, step: Step) -> None:
        """Record the token that each live row of a decode step added."""
        for slot in step.slots:
            past = int(step.past_lengths[slot])
            self._at_home[slot] = min(self._at_home[slot], past)
            self._in_decode[slot] = past + 1
            self.held.wrote(slot, past, past + 1)

    def end_at_home(self, step: Step) -> None:
        for row, slot in enumerate(step.slots):
            start = int(step.past_lengths[row])
            self._wrote_home(slot, start, start + int(step.new_lengths[row]))

    def nan_fill(self, slot: int, start: int, value: float) -> None:
        """Fill slot `slot` from `start` on, and before the next decode step everything that no token owns there."""
        kept, used = min(start, self.held.used[slot]), self.held.used[slot]
        self._bring_home(slot, kept)
        for part, array in zip(self.home.parts, self.home.arrays, strict=True):
            array[:, slot][:, :, self.home.free(part, slot, start, used)] = self.home.filling(part, value)
        if start == 0:
            for state in self.states:
                state[slot] = value
        self._wrote_home(slot, kept, kept)
        self._touched[slot] = self.home.length
        self.decode.nan_fill(value)

    def _copy_tokens(self, source: Tensors, slot: int, to: Tensors, row: int, start: int, end: int) -> None:
        """Copy tokens `start` … `end` − 1 of a slot from one layout's row to another's, as far as both have them."""
        for had, takes, held, array in zip(source.parts, to.parts, source.arrays, to.arrays, strict=True):
            known = self.held.first(slot, had.like)
            first = max(start, known, source.first(had, slot, end), to.first(takes, row, end))
            if start == 0:
                to.begin(takes, row, first)
            offsets = source.offsets(had, slot, first, end)
            array[:, row][:, :, to.offsets(takes, row, first, end)] = held[:, slot][:, :, offsets]

    def _wrote_home(self, slot: int, start: int, end: int) -> None:
        self._at_home[slot] = end
        self.held.wrote(slot, start, end)
        self._touched[slot] = max(self._touched[slot], end)
        if slot < self._rows:
            self._in_decode[slot] = min(self._in_decode[slot], start)

    def _bring_home(self, slot: int, length: int) -> None:
        held = self._at_home[slot]
        if held < length:
            held = self.home.make_room(slot, held, length)
            self._copy_tokens(self.decode, slot, self.home, slot, held, length)
            self._at_home[slot] = length
            self._touched[slot] = max(self._touched[slot], length)

    def _empty(self, rows: Sequence[int]) -> None:
        for row in rows:
            if row < len(self.held.used):
                self._bring_home(row, self.held.used[row])
            self._in_decode[row] = 0


class SlotCacheExecutor(Executor):
    """An executor whose constructor creates `_cache`, and `_staging` for prefill."""

    _cache: SlotCache
    _staging: Tensors

    def _stage(self, step: Step, length: int) -> None:
        """Lay out the staging cache in rows of `length` tokens that begin with the live rows' slots' contents."""
        self._staging.reserve(step.batch, length, step.query)
        for row in range(step.batch):
            past = int(step.past_lengths[row])
            self._staging.make_room(row, 0, past + step.query)
            if past and row < len(step.slots):
                self._cache.lay_out(step.slots[row], past, self._staging, row)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._cache.copy(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        kv = iter([tensor for part in self._cache.read(slot, length) for tensor in part])
        states = iter([state[slot].copy() for state in self._cache.states])
        return [next(kv if t.kind == "kv" else states) for t in self.bundle.cache_shape]

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        length = self._check_prefix(prefix, len(self.bundle.cache_shape))
        given = iter(prefix)
        parts = [np.stack([next(given) for _ in range(len(array))]) for array in self._cache.home.arrays]
        self._cache.write(slot, 0, length, parts)
        self._cache.held.imported(slot, length)

    def nan_fill(self, slot: int, start: int, value: float) -> None:
        self._cache.nan_fill(slot, start, value)
        self._staging.nan_fill(value)
