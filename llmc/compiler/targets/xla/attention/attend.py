"""The operator `llmc::attend` (frontend/attention.py, dialect `read_only`) in JAX: plain operators, or the kernel.

Portable programs have the plain form on every platform: JAX keeps it readable for later versions, and promises nothing
for Triton's IR (jax/_src/export/_export.py of 0.10.2, _CUSTOM_CALL_TARGETS_GUARANTEED_STABLE). The executable for a GPU
is compiled from the same step traced `with_kernel`.

`plain_attention` runs on every platform without a kernel, and defines the kernel's results. As in the dialect
`two_part` (frontend/attention.py), it concatenates scores over the past and the new tokens, and has one softmax in
float32 and two value matmuls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from llmc.compiler.targets.xla.attention.cache_view import CacheView, Past
from llmc.compiler.targets.xla.attention.kernel import flash_attention
from llmc.runtime.executors.xla.envelope import AXIS

Array = Any


def plain_attention(
    query: Array, key: Array, value: Array, past: Past, past_lengths: Array,
    scale: float, softcap: float, window: int,
) -> Array:  # fmt: skip
    """query [B, Hq, Q, D], key [B, Hkv, Q, D], value [B, Hkv, Q, Dv] → [B, Q, Hq, Dv], over cached and new tokens."""
    batch, heads, length, size = query.shape
    kv_heads = key.shape[1]
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT
    positions = past_lengths[:, None] + jnp.arange(length)
    keys, values, at = [key], [value], [positions]
    live = jnp.ones((batch, length), bool)
    if past:
        tokens = _positions(past_lengths[:, None], past[0].offsets, window)
        held = (tokens >= 0) & (tokens < past_lengths[:, None])
        # slots beyond the live length may be NaN, and 0 × NaN is NaN: replace, not mask
        cached = [jnp.where(held[:, None, :, None], view.rows(), 0).astype(query.dtype) for view in past]
        keys, values, at = [cached[0], key], [cached[1], value], [tokens, positions]
        live = jnp.concatenate([held, live], 1)
    position = jnp.concatenate(at, 1)[:, None, :]
    seen = (position <= positions[..., None]) & live[:, None, :]
    if window > 0:
        seen &= position > positions[..., None] - window
    grouped = (query * scale).astype(query.dtype).reshape(batch, kv_heads, -1, size)
    parts = [jnp.einsum("bhrd,bhkd->bhrk", grouped, k, precision=precision) for k in keys]
    scores = jnp.concatenate(parts, -1).reshape(batch, kv_heads, heads // kv_heads, length, -1).astype(jnp.float32)
    if softcap:
        scores = jnp.tanh(scores / softcap) * softcap
    lowest = jnp.finfo(jnp.float32).min
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, lowest), axis=-1).astype(value.dtype)
    weights = weights.reshape(batch, kv_heads, -1, weights.shape[-1])
    begin = weights.shape[-1] - length
    out = jnp.einsum("bhrk,bhkd->bhrd", weights[..., begin:], value, precision=precision)
    if past:
        out += jnp.einsum("bhrk,bhkd->bhrd", weights[..., :begin], values[0], precision=precision)
    return jnp.swapaxes(out.reshape(batch, heads, length, -1), 1, 2)


def _positions(past: Array, offsets: Any, window: int) -> Array:
    """The token position in each of a row's slots [B, slots].

    With a window, it is the last one before `past` [B, 1] in a ring buffer of so many slots, negative where there is
    none.
    """
    index = jnp.broadcast_to(jnp.arange(offsets), (len(past), offsets))
    return index if window <= 0 else past - 1 - jnp.remainder(past - 1 - index, offsets)


_RULE = ("scale", "softcap", "window")
# layers are alike: only a step's first is traced
_FLASH = jax.jit(flash_attention, static_argnames=_RULE)
_PLAIN = jax.jit(plain_attention, static_argnames=_RULE)
_KERNEL: ContextVar[bool] = ContextVar("llmc_attention_kernel", default=False)


def with_kernel(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `step`, which uses the attention kernel when it is traced."""

    def run(*args: Any) -> Any:
        token = _KERNEL.set(True)
        try:
            return step(*args)
        finally:
            _KERNEL.reset(token)

    return run


def attend(
    query: Array, key: Array, value: Array, past_lengths: Array, scale: float, softcap: float, window: int,
    past_key: CacheView | None = None, past_value: CacheView | None = None,
) -> Array:  # fmt: skip
    """query [B, Hq, Q, D], key [B, Hkv, Q, D], value [B, Hkv, Q, Dv] → [B, Q, Hq, Dv].

    Under a mesh (sharding.ShardedCore) the kernel runs on each device over its own key/value heads. Where these do not
    divide over the devices, the cache is replicated, and XLA decides how the plain form is split.
    """
    past = None if past_key is None or past_value is None else (past_key, past_value)
    rule = dict(zip(_RULE, (scale, softcap, window), strict=True))
    given = (query, key, value, past, past_lengths)
    mesh = jax.sharding.get_abstract_mesh()
    if not _KERNEL.get() or (not mesh.empty and key.shape[1] % mesh.shape[AXIS]):
        return _PLAIN(*given, **rule)
    if mesh.empty:
        return _FLASH(*given, **rule)
    heads, whole = PartitionSpec(None, AXIS), PartitionSpec()
    split = jax.shard_map(
        partial(_FLASH, **rule), mesh=mesh, in_specs=(heads, heads, heads, _specs(past), whole),
        out_specs=PartitionSpec(None, None, AXIS), check_vma=False,
    )  # fmt: skip
    return split(*given)


def _specs(past: Past) -> Any:
    """The partitioning of keys and values, by heads as in sharding.cache_dims."""
    cache, whole = PartitionSpec(None, None, AXIS), PartitionSpec()
    if past is None:
        return None
    return tuple(replace(view, cache=cache, layer=whole, slots=whole) for view in past)
