"""Programs on the device for cache slots between steps: copy, fill, read and write.

All take the cache's arrays first, one for each of `CacheShape.groups`: keys or values [layers, slots, kv_heads,
capacity, head_dim], states [layers, slots, …]. All but `slot_read` are given them to change in place. Numbers are int32
scalars. A state goes with any number of tokens.

    slot_copy(*cache, source, target, length)   the first `length` tokens of one slot, and its states, into another
    slot_fill(*cache, slot, start, value)       `value` (float32) from token `start` on; in states where that is 0
    slot_read(*cache, slot)                     → what a slot has of each array: [layers, kv_heads, capacity, head_dim]
                                                  or [layers, …]
    slot_write(*cache, slot, length, *rows)     the first `length` tokens of such rows, and their states, into a slot
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from llmc.runtime.executors.xla.envelope import Tensor

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import Kind

Array = Any


def slot_programs(
    cache: Sequence[Tensor], kinds: Sequence[Kind]
) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], bool]]:
    """Each program by name: its function, its inputs, and whether it changes the cache. `kinds`: those of `cache`."""
    numbers = [Tensor(name, (), "int32", ()) for name in ("slot", "other", "tokens")]
    value = Tensor("value", (), "float32", ())
    made = _Slots(kinds)
    return {
        "slot_copy": (made.copy, (*cache, *numbers), True),
        "slot_fill": (made.fill, (*cache, numbers[0], numbers[2], value), True),
        "slot_read": (made.read, (*cache, numbers[0]), False),
        "slot_write": (made.write, (*cache, numbers[0], numbers[2], *map(_row, cache)), True),
    }


def _row(tensor: Tensor) -> Tensor:
    """One slot of a cache tensor."""
    return Tensor(
        f"{tensor.name}_row", tensor.shape[:1] + tensor.shape[2:], tensor.dtype, tensor.dims[:1] + tensor.dims[2:]
    )


class _Slots:
    """The programs' functions, over arrays of `kinds`."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds

    def copy(self, *given: Array) -> tuple[Array, ...]:
        *cache, source, target, length = given
        return self._changed(cache, target, 0, length, [_slot(c, source) for c in cache])

    def fill(self, *given: Array) -> tuple[Array, ...]:
        *cache, slot, start, value = given
        return self._changed(cache, slot, start, None, [value.astype(c.dtype) for c in cache])

    def read(self, *given: Array) -> tuple[Array, ...]:
        *cache, slot = given
        return tuple(_slot(c, slot)[:, 0] for c in cache)

    def write(self, *given: Array) -> tuple[Array, ...]:
        count = len(self._kinds)
        cache, (slot, length), rows = given[:count], given[count : count + 2], given[count + 2 :]
        return self._changed(cache, slot, 0, length, [row[:, None] for row in rows])

    def _changed(
        self, cache: Sequence[Array], slot: Array, start: Any, end: Any, new: Sequence[Array]
    ) -> tuple[Array, ...]:
        """`cache` with tokens `start` … `end` − 1 (None: all behind) of a slot replaced by those of `new`; its states
        where they begin at 0."""
        return tuple(
            _tokens(c, slot, start, c.shape[3] if end is None else end, row) if kind == "kv"
            else _state(c, slot, start, row)
            for kind, c, row in zip(self._kinds, cache, new, strict=True)
        )  # fmt: skip


def _slot(cache: Array, slot: Array) -> Array:
    return lax.dynamic_slice_in_dim(cache, slot, 1, axis=1)


def _tokens(cache: Array, slot: Array, start: Any, end: Any, new: Array) -> Array:
    token = jnp.arange(cache.shape[3])[:, None]
    row = jnp.where((token >= start) & (token < end), new, _slot(cache, slot))
    return lax.dynamic_update_slice_in_dim(cache, row, slot, axis=1)


def _state(cache: Array, slot: Array, start: Any, new: Array) -> Array:
    row = jnp.where(start == 0, new, _slot(cache, slot))
    return lax.dynamic_update_slice_in_dim(cache, row, slot, axis=1)
