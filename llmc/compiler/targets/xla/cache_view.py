"""References to one layer's keys or values in the slot cache, for operators that read the cache themselves."""

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
    """A part of one group of the cache's tensors: keys or values [layers, slots, kv_heads, offsets, head_dim], or
    recurrent states [layers, slots, …].
    """

    cache: Array
    layer: Any
    """A number, or traced."""
    slots: Array
    """[B]: the slot of each row, −1 for a dummy row. Row b of a decode step has slot b, or is a dummy row."""
    phase: str
    offsets: int | None
    """Offsets of a slot that the step's context may fill with tokens; None for recurrent states, which have
    no tokens.
    """
    wraps: bool = False
    """Whether there may be more tokens than offsets, which are then a whole ring buffer (runtime/cache_shape.py)."""

    def rows(self) -> Array:
        """Return each row's first `offsets`, [B, kv_heads, offsets, head_dim], or its recurrent state [B, …]."""
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
