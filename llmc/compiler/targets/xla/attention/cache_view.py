"""A layer's keys or values of a step's rows, where they lie: for operators that read the cache themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any


@partial(jax.tree_util.register_dataclass, data_fields=["cache", "layer", "slots"], meta_fields=["phase", "context"])
@dataclass(frozen=True)
class CacheView:
    """Keys or values [layers, slots, kv_heads, capacity, head_dim] of all layers, and which of them are meant."""

    cache: Array
    layer: Any
    """A number, or traced."""
    slots: Array
    """[B]: the slot of each row, −1 for a dummy row. Row b of a decode step has slot b, or is a dummy row."""
    phase: str
    context: int
    """The tokens of a slot that may be live."""

    def rows(self) -> Array:
        """The first `context` tokens of each row's slot, [B, kv_heads, context, head_dim]."""
        _, _, heads, _, size = self.cache.shape
        batch, zero = self.slots.shape[0], jnp.int32(0)
        if self.phase == "decode":
            at = (self.layer, zero, zero, zero, zero)
            return lax.dynamic_slice(self.cache, at, (1, batch, heads, self.context, size))[0]
        sizes = (1, 1, heads, self.context, size)
        places = [(self.layer, jnp.maximum(self.slots[b], 0), zero, zero, zero) for b in range(batch)]
        return jnp.concatenate([lax.dynamic_slice(self.cache, at, sizes)[0] for at in places])


Past = tuple[CacheView, CacheView] | None
"""Keys and values of a layer, or no cache."""
