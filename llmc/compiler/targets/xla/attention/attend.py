"""The operator `llmc::attend` (frontend/attention.py, dialect `read_only`) in JAX: plain operators, or the kernel.

Portable programs have the plain form, on every platform: JAX keeps them readable for later versions, and promises
nothing for Triton's IR (jax/_src/export/_export.py of 0.10.2, _CUSTOM_CALL_TARGETS_GUARANTEED_STABLE). What is compiled
for a card is the same step traced `with_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from llmc.compiler.targets.xla.attention.cache_view import CacheView, Past
from llmc.compiler.targets.xla.attention.flash import flash_attention
from llmc.compiler.targets.xla.attention.plain import plain_attention
from llmc.runtime.executors.xla.envelope import AXIS

Array = Any
_RULE = ("scale", "softcap", "window")
# layers are alike: of all of a step the first is traced
_FLASH = jax.jit(flash_attention, static_argnames=_RULE)
_PLAIN = jax.jit(plain_attention, static_argnames=_RULE)
_KERNEL: ContextVar[bool] = ContextVar("llmc_attention_kernel", default=False)


def with_kernel(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, whose attention is the kernel when it is traced."""

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
    divide over the devices, the cache is whole on each, and the plain form is split as XLA likes.
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
    """How keys and values lie: split by heads, as sharding.cache_dims has it."""
    cache, whole = PartitionSpec(None, None, AXIS), PartitionSpec()
    if past is None:
        return None
    return tuple(replace(view, cache=cache, layer=whole, slots=whole) for view in past)
