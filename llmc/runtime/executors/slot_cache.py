"""Key and value caches for ONNX Runtime's in-place attention, whose layout a compiled graph fixes.

A decode graph with static shapes takes the first rows of a cache that is exactly as long as its bucket says, and writes
in every row, dummy rows too. So the tokens of all slots live in a `home` of full length, and a slot is laid out once
more, in the decode cache, while it takes part in decode. Both copies are lazy. Tokens that decode added are copied to
the home when another layout, a dummy row, a copy, an export or a prompt step needs it. They are copied back when the
slot decodes again. Steps over the same slots in the same bucket copy nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.executors.base import Executor, require_held
from llmc.runtime.executors.sparse import sparse_bytes

if TYPE_CHECKING:
    from llmc.runtime.step import Step

Array = NDArray[np.float32]


class Tensors:
    """Keys and values of all layers in one buffer, `array` [tensors, slots, heads, length, head_dim].

    The buffer has room for `places` tokens of all slots together, and never moves. `sparse`: it takes memory as tokens
    come, for a cache of which little is used.
    """

    def __init__(
        self, tensors: int, heads: int, head_dim: int, places: int, sparse: bool = False, dtype: type = np.float32
    ) -> None:
        self._fixed = (tensors, heads, head_dim)
        count = tensors * heads * head_dim * places
        size = count * np.dtype(dtype).itemsize
        self._buffer: Array = sparse_bytes(size).view(dtype) if sparse and count else np.zeros(count, dtype)
        self._fill: float | None = None
        self.array: Array = self._buffer[:0].reshape(tensors, 0, heads, 0, head_dim)
        self.nbytes = 0
        """Bytes that layouts ever took; the rest of the buffer is address space without memory."""

    @property
    def slots(self) -> int:
        """Rows."""
        return int(self.array.shape[1])

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return int(self.array.shape[3])

    def keeps(self, slots: int, length: int) -> bool:
        """Whether `reserve` of this shape would leave the contents as they are."""
        return (slots, length) == (self.slots, self.length) and self._fill is None

    def reserve(self, slots: int, length: int) -> None:
        """Take `slots` rows of `length` tokens. Contents are lost, unless that is the shape already."""
        tensors, heads, head_dim = self._fixed
        if (slots, length) != (self.slots, self.length):
            size = tensors * slots * heads * length * head_dim
            self.array = self._buffer[:size].reshape(tensors, slots, heads, length, head_dim)
            self.nbytes = max(self.nbytes, self.array.nbytes)
        if self._fill is not None:
            self.array.fill(self._fill)
            self._fill = None

    def poison(self, value: float) -> None:
        """Let the next `reserve` fill everything with `value`."""
        self._fill = value


class SlotCache:
    """The cached tokens of `slots` sequences of up to `capacity` tokens, `decode_rows` of which a step can decode.

    Of slot s, the home holds tokens 0 … at_home[s] − 1, and its row of the decode cache 0 … in_decode[s] − 1; the
    longer of the two covers the used[s] tokens that the slot has. With `decode_rows` 0 there is a home only.
    `sizes` are tensors, heads and head_dim; `decode_length` the longest layout of the decode cache, in tokens.
    """

    def __init__(
        self, sizes: tuple[int, int, int], slots: int, capacity: int, decode_rows: int = 0, decode_length: int = 0,
        dtype: type = np.float32,
    ) -> None:  # fmt: skip
        self.home = Tensors(*sizes, slots * capacity, sparse=True, dtype=dtype)
        self.home.reserve(slots, capacity)
        self.decode = Tensors(*sizes, decode_rows * decode_length)
        self.used = [0] * slots
        self._at_home = [0] * slots
        self._in_decode = [0] * decode_rows
        self._rows = decode_rows
        self._touched = [0] * slots
        self._token_bytes = np.dtype(dtype).itemsize * math.prod(sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory: the decode cache, and what was ever written of the home (each slot's longest)."""
        return self.decode.nbytes + sum(self._touched) * self._token_bytes

    def read(self, slot: int, length: int) -> Array:
        """The first `length` tokens of a slot, [tensors, heads, length, head_dim]: a view of the home."""
        require_held(self.used, slot, length)
        self._bring_home(slot, length)
        return self.home.array[:, slot, :, :length]

    def write(self, slot: int, start: int, new: Array) -> None:
        """Put `new` [tensors, heads, n, head_dim] behind the first `start` tokens of a slot, which ends there."""
        require_held(self.used, slot, start)
        self._bring_home(slot, start)
        end = start + new.shape[2]
        self.home.array[:, slot, :, start:end] = new
        self._wrote_home(slot, start, end)

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of slot `source` all that slot `target` has."""
        kept = self.read(source, length)
        if source != target:
            self.home.array[:, target, :, :length] = kept
        self._wrote_home(target, 0 if source != target else length, length)

    def begin_decode(self, step: Step) -> Tensors:
        """The decode cache laid out for a decode step over the first slots, its live rows loaded; dummy rows cover
        nothing of value."""
        length = step.context + 1
        if not self.decode.keeps(self._rows, length):
            self._empty(range(self._rows))
            self.decode.reserve(self._rows, length)
        self._empty(range(len(step.slots), step.batch))
        for slot in step.slots:
            past, there = int(step.past_lengths[slot]), self._in_decode[slot]
            if there < past:
                self.decode.array[:, slot, :, there:past] = self.home.array[:, slot, :, there:past]
        return self.decode

    def end_decode(self, step: Step) -> None:
        """Count the token that each live row of a decode step added."""
        for slot in step.slots:
            past = int(step.past_lengths[slot])
            self._at_home[slot] = min(self._at_home[slot], past)
            self._in_decode[slot] = self.used[slot] = past + 1

    def end_at_home(self, step: Step) -> None:
        """Count the tokens that each live row of a step over the home added."""
        for row, slot in enumerate(step.slots):
            start = int(step.past_lengths[row])
            self._wrote_home(slot, start, start + int(step.new_lengths[row]))

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite slot `slot` from `start` on, and before the next decode step all that no token owns there."""
        self._bring_home(slot, min(start, self.used[slot]))
        self.home.array[:, slot, :, start:] = value
        self._wrote_home(slot, 0, min(start, self.used[slot]))
        self._touched[slot] = self.home.length
        self.decode.poison(value)

    def _wrote_home(self, slot: int, start: int, end: int) -> None:
        self._at_home[slot] = self.used[slot] = end
        self._touched[slot] = max(self._touched[slot], end)
        if slot < self._rows:
            self._in_decode[slot] = min(self._in_decode[slot], start)

    def _bring_home(self, slot: int, length: int) -> None:
        """Copy what decode added to a slot, up to `length` tokens, to its home."""
        held = self._at_home[slot]
        if held < length:
            self.home.array[:, slot, :, held:length] = self.decode.array[:, slot, :, held:length]
            self._at_home[slot] = length
            self._touched[slot] = max(self._touched[slot], length)

    def _empty(self, rows: Sequence[int]) -> None:
        """Let nothing depend on some rows of the decode cache."""
        for row in rows:
            if row < len(self.used):
                self._bring_home(row, self.used[row])
            self._in_decode[row] = 0


class SlotCacheExecutor(Executor):
    """An executor whose constructor makes `_cache`, and `_staging` for prompt steps."""

    _cache: SlotCache
    _staging: Tensors

    def _stage(self, step: Step, length: int) -> Array:
        """The staging cache in rows of `length` tokens, which begin with what the live rows' slots hold."""
        self._staging.reserve(step.batch, length)
        staged = self._staging.array
        for row, slot in enumerate(step.slots):
            past = int(step.past_lengths[row])
            if past:
                staged[:, row, :, :past] = self._cache.read(slot, past)
        return staged

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy between the homes of two slots; decode lays the target out when it takes part."""
        self._cache.copy(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """Copies out of the slot's home."""
        return list(self._cache.read(slot, length).astype(np.float32))

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Copies into the slot's home."""
        self._check_prefix(prefix, len(self._cache.home.array))
        self._cache.write(slot, 0, np.stack(prefix))

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what no live token owns, there and wherever live tokens are laid out."""
        self._cache.poison(slot, start, value)
        self._staging.poison(value)
