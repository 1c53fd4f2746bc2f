"""Programs on the device for cache slots between steps: copy, fill, read and write.

All take the cache's arrays first, one for each of `CacheShape.groups`: keys or values [layers, slots, kv_heads,
offsets, head_dim], recurrent states [layers, slots, …]. All but `slot_read` update them in place. Numbers are int32
scalars. A recurrent state is copied with any number of tokens.

    slot_copy(*cache, source, target, length)    copies a slot's first `length` offsets and its states to another slot
    slot_fill(*cache, slot, start, used, value)  writes `value` (float32) from token `start` on, in a slot that has had
                                                 `used` tokens; in states where `start` is 0
    slot_read(*cache, slot)                      → a slot's part of each array: [layers, kv_heads, offsets, head_dim]
                                                   or [layers, …]
    slot_write(*cache, slot, length, *rows)      writes the first `length` offsets of such rows, and their states, to a
                                                 slot
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from llmc.runtime.executors.xla.envelope import Tensor

if TYPE_CHECKING:
    from llmc.compiler.targets.xla.capacity import ArrayKind

Array = Any


def slot_programs(
    cache: Sequence[Tensor], kinds: Sequence[ArrayKind]
) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], bool]]:
    """Return each program by name: its function, inputs, and whether it changes the cache. `kinds`: those of
    `cache`.
    """
    numbers = [Tensor(name, (), "int32", ()) for name in ("slot", "other", "tokens")]
    used = Tensor("used", (), "int32", ())
    value = Tensor("value", (), "float32", ())
    built = _Slots(kinds)
    return {
        "slot_copy": (built.copy, (*cache, *numbers), True),
        "slot_fill": (built.fill, (*cache, numbers[0], numbers[2], used, value), True),
        "slot_read": (built.read, (*cache, numbers[0]), False),
        "slot_write": (built.write, (*cache, numbers[0], numbers[2], *map(_row, cache)), True),
    }


def _row(tensor: Tensor) -> Tensor:
    return Tensor(
        f"{tensor.name}_row", tensor.shape[:1] + tensor.shape[2:], tensor.dtype, tensor.dims[:1] + tensor.dims[2:]
    )


class _Slots:
    """The programs' functions, over arrays of `kinds`."""

    def __init__(self, kinds: Sequence[ArrayKind]) -> None:
        self._kinds = kinds

    def copy(self, *given: Array) -> tuple[Array, ...]:
        *cache, source, target, length = given
        return self._begun(cache, target, length, [_slot(c, source) for c in cache])

    def fill(self, *given: Array) -> tuple[Array, ...]:
        *cache, slot, start, used, value = given
        return tuple(
            _replaced(c, slot, _mask(kind, c, start, used), value.astype(c.dtype))
            for kind, c in zip(self._kinds, cache, strict=True)
        )

    def read(self, *given: Array) -> tuple[Array, ...]:
        *cache, slot = given
        return tuple(_slot(c, slot)[:, 0] for c in cache)

    def write(self, *given: Array) -> tuple[Array, ...]:
        count = len(self._kinds)
        cache, (slot, length), rows = given[:count], given[count : count + 2], given[count + 2 :]
        return self._begun(cache, slot, length, [row[:, None] for row in rows])

    def _begun(self, cache: Sequence[Array], slot: Array, length: Array, new: Sequence[Array]) -> tuple[Array, ...]:
        """`cache` with a slot's first `length` offsets and its states replaced by those of `new`."""
        return tuple(
            _replaced(c, slot, True if kind == "state" else _offsets(c) < length, row)
            for kind, c, row in zip(self._kinds, cache, new, strict=True)
        )


def _slot(cache: Array, slot: Array) -> Array:
    return lax.dynamic_slice_in_dim(cache, slot, 1, axis=1)


def _offsets(cache: Array) -> Array:
    return jnp.arange(cache.shape[3])[:, None]


def _mask(kind: ArrayKind, cache: Array, start: Array, used: Array) -> Array:
    """Elements that belong to no token before `start`, in a slot that has had `used` tokens."""
    if kind == "state":
        return start == 0
    index = _offsets(cache)
    if kind == "kv":
        return index >= start
    ring = cache.shape[3]
    return start + jnp.remainder(index - start, ring) < jnp.maximum(used, ring)


def _replaced(cache: Array, slot: Array, mask: Any, new: Array) -> Array:
    row = jnp.where(mask, new, _slot(cache, slot))
    return lax.dynamic_update_slice_in_dim(cache, row, slot, axis=1)
