"""Attention that reads the slot cache where it lies, and of each row only its live tokens (kernel.py has the kernel).

`jax.experimental.pallas.ops.gpu.decode_attention` would do for one new token, but takes keys and values
[B, tokens, kv_heads, head_dim]: our cache would be copied into that form in every step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from llmc.compiler.targets.xla.attention import kernel
from llmc.compiler.targets.xla.attention.cache_view import Past
from llmc.compiler.targets.xla.attention.kernel import Tiling

Array = Any


def flash_attention(
    query: Array, key: Array, value: Array, past: Past, past_lengths: Array,
    scale: float, softcap: float, window: int, interpret: bool = False,
) -> Array:  # fmt: skip
    """query [B, Hq, Q, D], key [B, Hkv, Q, D], value [B, Hkv, Q, Dv] → [B, Q, Hq, Dv], over the cached tokens and the
    new ones.

    A dummy row attends to its new tokens alone. `interpret` runs the kernel in NumPy's stead, on any platform.
    """
    batch, heads, length, size = query.shape
    kv_heads, width = key.shape[1], value.shape[3]
    places, wraps = ((past[0].places or 0), past[0].wraps) if past else (0, False)
    tiling = Tiling(batch, kv_heads, heads // kv_heads, length, size, width, places, query.dtype.itemsize, wraps)
    rows = jnp.swapaxes(query, 1, 2)
    inputs: tuple[Array, ...] = (rows, key, value)
    if past:
        keys, values = past
        live = jnp.where(keys.slots >= 0, past_lengths, 0)
        inputs = (
            jnp.stack([jnp.asarray(view.layer, jnp.int32) for view in past]),
            jnp.maximum(keys.slots, 0),
            live,
            *inputs,
            keys.cache,
            values.cache,
        )
    made = (batch, length, heads, width)
    shapes = [jax.ShapeDtypeStruct(made, query.dtype)]
    if tiling.splits > 1:
        sums = jax.ShapeDtypeStruct((tiling.splits, *made), jnp.float32)
        shapes = [sums, *[jax.ShapeDtypeStruct(sums.shape[:-1], jnp.float32)] * 2]
    outs = pl.pallas_call(
        partial(_program, tiling=tiling, scale=scale, softcap=softcap, window=window),
        out_shape=shapes,
        grid=(batch, kv_heads, tiling.tiles * tiling.splits),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention",
    )(*inputs)
    return outs[0] if tiling.splits == 1 else merge(*outs).astype(query.dtype)


def merge(sums: Array, tops: Array, weights: Array) -> Array:
    """The splits' unnormalised sums [splits, …, D], largest scores and weights [splits, …] as one result [… , D]."""
    share = jnp.exp(tops - jnp.max(tops, axis=0))
    return jnp.sum(sums * share[..., None], axis=0) / jnp.sum(weights * share, axis=0)[..., None]


def _program(*refs: Any, tiling: Tiling, **rule: Any) -> None:
    given = refs if tiling.places else (None, None, None, *refs[:3], None, None, *refs[3:])
    kernel.program(*given, tiling=tiling, **rule)
