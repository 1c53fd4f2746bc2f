"""A layer's keys or values of a step's rows, where they lie: for operators that read the cache themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any


_META = ["phase", "offsets", "wraps"]


@partial(jax.tree_util.register_dataclass, data_fields=["cache", "layer", "slots"], meta_fields=_META)
@dataclass(frozen=True)
class CacheView:
    """One group of the cache's tensors, and which of them are meant: keys or values of several layers [layers, slots,
    kv_heads, places, head_dim], or states [layers, slots, …]."""

    cache: Array
    layer: Any
    """A number, or traced."""
    slots: Array
    """[B]: the slot of each row, −1 for a dummy row. Row b of a decode step has slot b, or is a dummy row."""
    phase: str
    offsets: int | None
    """Of a slot, those that the step's context may have tokens in; None of states, which have no tokens."""
    wraps: bool = False
    """Whether there may be more tokens than places, which are a ring's then, all of them (runtime/cache_shape.py)."""

    def rows(self) -> Array:
        """The first `offsets` of each row's slot, [B, kv_heads, places, head_dim], or its state [B, …]."""
        inner = self.cache.shape[2:]
        if self.offsets is not None:
            inner = (inner[0], self.offsets, inner[2])
        batch, zero = self.slots.shape[0], jnp.int32(0)
        start = (zero,) * len(inner)
        if self.phase == "decode":
            return lax.dynamic_slice(self.cache, (self.layer, zero, *start), (1, batch, *inner))[0]
        sizes = (1, 1, *inner)
        offsets = [(self.layer, jnp.maximum(self.slots[b], 0), *start) for b in range(batch)]
        return jnp.concatenate([lax.dynamic_slice(self.cache, at, sizes)[0] for at in offsets])


Past = tuple[CacheView, CacheView] | None
"""Keys and values of a layer, or no cache."""
