"""Programs on the device for cache slots between steps: copy, fill, read and write.

All take keys and values [layers, slots, kv_heads, capacity, head_dim] first; all but `slot_read` are given them to
change in place. Numbers are int32 scalars.

    slot_copy(keys, values, source, target, length)     the first `length` tokens of one slot into another
    slot_fill(keys, values, slot, start, value)         `value` (float32) from token `start` on
    slot_read(keys, values, slot)                       → key and value [layers, kv_heads, capacity, head_dim]
    slot_write(keys, values, slot, length, key, value)  the first `length` tokens of such a key and value into a slot
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from llmc.runtime.executors.xla.envelope import Tensor

Array = Any


def slot_programs(keys: Tensor, values: Tensor) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], bool]]:
    """Each program by name: its function, its inputs, and whether it changes the cache."""
    cache = (keys, values)
    numbers = [Tensor(name, (), "int32", ()) for name in ("slot", "other", "tokens")]
    value = Tensor("value", (), "float32", ())
    rows = tuple(_row(t) for t in cache)
    return {
        "slot_copy": (_copy, (*cache, *numbers), True),
        "slot_fill": (_fill, (*cache, numbers[0], numbers[2], value), True),
        "slot_read": (_read, (*cache, numbers[0]), False),
        "slot_write": (_write, (*cache, numbers[0], numbers[2], *rows), True),
    }


def _row(tensor: Tensor) -> Tensor:
    """One slot of a cache tensor."""
    return Tensor(
        f"{tensor.name}_row", tensor.shape[:1] + tensor.shape[2:], tensor.dtype, tensor.dims[:1] + tensor.dims[2:]
    )


def _copy(keys: Array, values: Array, source: Array, target: Array, length: Array) -> tuple[Array, ...]:
    return tuple(_changed(c, target, 0, length, _slot(c, source)) for c in (keys, values))


def _fill(keys: Array, values: Array, slot: Array, start: Array, value: Array) -> tuple[Array, ...]:
    return tuple(_changed(c, slot, start, c.shape[3], value.astype(c.dtype)) for c in (keys, values))


def _read(keys: Array, values: Array, slot: Array) -> tuple[Array, ...]:
    return tuple(_slot(c, slot)[:, 0] for c in (keys, values))


def _write(keys: Array, values: Array, slot: Array, length: Array, key: Array, value: Array) -> tuple[Array, ...]:
    return tuple(_changed(c, slot, 0, length, row[:, None]) for c, row in ((keys, key), (values, value)))


def _slot(cache: Array, slot: Array) -> Array:
    return lax.dynamic_slice_in_dim(cache, slot, 1, axis=1)


def _changed(cache: Array, slot: Array, start: Any, end: Any, new: Array) -> Array:
    """`cache` with tokens `start` … `end` − 1 of a slot replaced by those of `new`."""
    token = jnp.arange(cache.shape[3])[:, None]
    row = jnp.where((token >= start) & (token < end), new, _slot(cache, slot))
    return lax.dynamic_update_slice_in_dim(cache, row, slot, axis=1)
