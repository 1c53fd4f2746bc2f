"""The operator `llmc::attend` (frontend/attention.py, dialect `read_only`) in JAX: plain operators, or the kernel.

Portable programs have the plain form on every platform: JAX keeps it readable for later versions, and promises nothing
for Triton's IR (jax/_src/export/_export.py of 0.10.2, _CUSTOM_CALL_TARGETS_GUARANTEED_STABLE). The executable for a GPU
is compiled from the same step traced `with_kernel`.

`plain_attention` runs on every platform without a kernel, and defines the kernel's results. As in the dialect
`two_part` (frontend/attention.py), it concatenates scores over the past and the new tokens, and has one softmax in
float32 and two value matmuls.

`flash_attention` is a kernel in Pallas for Triton. It reads the slot cache in place, and only the live tokens of each
row. `jax.experimental.pallas.ops.gpu.decode_attention` would do for one new token, but takes keys and values [B,
tokens, kv_heads, head_dim]: our cache would be copied into that form in every step.

Grid (B, kv_heads, tiles · splits). A program computes one tile over one split. A tile has `rows` query rows of one
key/value head's group, ordered by token, then by head: row r is token r // group, head r % group of the group. Split s
takes the s-th part of the blocks of cached tokens that the tile may see; the last split also takes the new tokens. A
block's loads are masked by the row's live length, so that nothing beyond it, NaN included, is read.

Softmax is the running one (Milakov and Gimelshein 2018, arXiv:1805.02867), over splits as in flash decoding: with
several splits the program outputs the unnormalised sum, its largest score and its weight; `merge` combines them.

`Tiling` derives rows, blocks and splits from shapes only. Tile sizes are powers of two of at least 16: Triton's own
rule for matmul operands on tensor cores (`tl.dot` in its documentation). Nothing here was tuned on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import PartitionSpec

from llmc.compiler.targets.xla.cache_view import CacheView, Past
from llmc.runtime.executors.xla.envelope import AXIS

_LEAST = 16
_BLOCK_BYTES = 16 * 1024
"""Bytes of one block of keys. Two stages of keys and values, with the queries, fit the 99 KiB of a program on the
smallest GPUs (compute capability 8.6 and 8.9; CUDA C++ Programming Guide, "Technical Specifications").
"""
_ROWS = 64
"""The most query rows of a program."""
_SUMS = 64 * 128
"""The most accumulators of a program, unless its values are wider than 512: 64 registers a thread of 128."""
_PROGRAMS = 264
"""Desired number of programs: two for each of an H100's 132 multiprocessors."""
_SPLIT_TOKENS = 256
"""The fewest cached tokens that justify a split of their own."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of one step's attention, and its division into programs."""

    batch: int
    kv_heads: int
    group: int
    """Query heads of a key/value head."""
    query: int
    head_dim: int
    """Size of a query or key head."""
    value_dim: int
    """Size of a value head, and of a result head."""
    offsets: int
    """Offsets of a row's cached tokens; 0 without a cache."""
    item_bytes: int
    """Bytes of a number of query, key and value."""
    wraps: bool = False
    """Whether a row may have more cached tokens than offsets, which are then a ring buffer."""

    @property
    def padded_dim(self) -> int:
        return _power(self.head_dim)

    @property
    def padded_value(self) -> int:
        return _power(self.value_dim)

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return min(_power(self.group * self.query), _ROWS, max(_LEAST, _SUMS // self.padded_value))

    @property
    def tiles(self) -> int:
        """Programs that share the query rows of one head."""
        return -(-self.group * self.query // self.rows)

    @property
    def block(self) -> int:
        """Cached tokens read at once."""
        widest = max(self.padded_dim, self.padded_value)
        return max(_LEAST, min(128, _BLOCK_BYTES // (widest * self.item_bytes)))

    @property
    def block_new(self) -> int:
        """New tokens read at once."""
        return min(self.block, _power(self.query))

    @property
    def splits(self) -> int:
        """Programs that share the cached tokens of one tile: enough to fill a GPU, each with a worthwhile share."""
        wanted = _PROGRAMS // (self.batch * self.kv_heads * self.tiles)
        return max(1, min(wanted, -(-self.offsets // _SPLIT_TOKENS)))


def _power(number: int) -> int:
    return max(_LEAST, 1 << (number - 1).bit_length())


Ref = Any
Array = Any
_Running = tuple[Array, Array, Array]
"""Largest score and sum of weights [rows], and the weighted sum of values [rows, value_dim]."""
NOTHING = -1e30
"""Initial largest score: finite, so that differences of two are finite."""


def program(
    layer: Ref, slots: Ref, past: Ref, query: Ref, key: Ref, value: Ref, keys: Ref, values: Ref, *outs: Ref,
    tiling: Tiling, scale: float, softcap: float, window: int,
) -> None:  # fmt: skip
    """Compute one tile over one split; shapes are those of `flash_attention`.

    `layer` [2] (of keys, and of values) and `slots` [B] locate a row's tokens in `keys` and `values`, `past` [B] counts
    the live ones; these five are None without a cache. `outs` are the result [B, Q, Hq, Dv], or with several splits the
    sums [splits, B, Q, Hq, Dv], largest scores and weights [splits, B, Q, Hq].
    """
    t = tiling
    b, head = pl.program_id(0), pl.program_id(1)
    tile, split = pl.program_id(2) // t.splits, pl.program_id(2) % t.splits
    live = past[b] if t.offsets else 0
    held = jnp.minimum(live, t.offsets)
    row = tile * t.rows + jnp.arange(t.rows)
    token, own_head = row // t.group, head * t.group + row % t.group
    mine = (token < t.query)[:, None]
    widths = [jnp.arange(padded)[None, :] for padded in (t.padded_dim, t.padded_value)]
    inside = [dims < size for dims, size in zip(widths, (t.head_dim, t.value_dim), strict=True)]
    at, out_at = ((b, token[:, None], own_head[:, None], dims) for dims in widths)
    q = plt.load(query.at[at], mask=mine & inside[0], other=0.0)

    def attend(carried: _Running, positions: Array, there: Array, blocks: Sequence[Ref]) -> _Running:
        """Add a block of keys and values at `positions`, of which `there` are tokens at all."""
        own = live + token[:, None]
        seen = (positions[None, :] <= own) & there[None, :]
        if window > 0:
            seen &= positions[None, :] > own - window
        masks = (there[:, None] & own for own in inside)
        k, v = (plt.load(r, mask=m, other=0.0).astype(q.dtype) for r, m in zip(blocks, masks, strict=True))
        return _add(carried, q, k, v, seen, scale, softcap)

    def past_block(j: Array, carried: _Running) -> _Running:
        offsets = j * t.block + jnp.arange(t.block)
        # the last token at each ring-buffer offset; anything for unused ones
        tokens = live - 1 - lax.rem(live - 1 - offsets, t.offsets) if t.wraps else offsets
        blocks = [
            cache.at[layer[i], slots[b], head, offsets[:, None], widths[i]] for i, cache in enumerate((keys, values))
        ]
        return attend(carried, tokens, offsets < held, blocks)

    def new_block(j: Array, carried: _Running) -> _Running:
        tokens = j * t.block_new + jnp.arange(t.block_new)
        blocks = [new.at[b, head, tokens[:, None], widths[i]] for i, new in enumerate((key, value))]
        return attend(carried, live + tokens, tokens < t.query, blocks)

    first, last = tile * t.rows // t.group, jnp.minimum((tile * t.rows + t.rows - 1) // t.group, t.query - 1)
    skipped = first - window + 1  # tokens before the window's first, counted from the first new one
    begin_new = jnp.maximum(skipped, 0) // t.block_new if window > 0 else 0
    carried = (jnp.full((t.rows,), NOTHING), jnp.zeros((t.rows,)), jnp.zeros((t.rows, t.padded_value)))
    if t.offsets:
        blocks, begin = pl.cdiv(held, t.block), 0
        if window > 0 and not t.wraps:
            begin = jnp.maximum(live + skipped, 0) // t.block
        share = pl.cdiv(jnp.maximum(blocks - begin, 0), t.splits)
        start = begin + split * share
        carried = lax.fori_loop(start, jnp.minimum(start + share, blocks), past_block, carried)
    end = jnp.where(split == t.splits - 1, last // t.block_new + 1, 0)
    top, weight, total = lax.fori_loop(begin_new, end, new_block, carried)
    kept = mine & inside[1]
    if t.splits == 1:
        plt.store(outs[0].at[out_at], (total / weight[:, None]).astype(outs[0].dtype), mask=kept)
        return
    plt.store(outs[0].at[(split, *out_at)], total, mask=kept)
    for out, built in zip(outs[1:], (top, weight), strict=True):
        plt.store(out.at[split, b, token, own_head], built, mask=token < t.query)


def _add(carried: _Running, q: Array, k: Array, v: Array, seen: Array, scale: float, softcap: float) -> _Running:
    largest, weight, total = carried
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = plt.dot(q, k, trans_b=True, precision=precision) * scale
    if softcap:
        scores = jnp.tanh(scores / softcap) * softcap
    top = jnp.maximum(largest, jnp.max(jnp.where(seen, scores, NOTHING), axis=1))
    weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
    keep = jnp.exp(largest - top)
    total = total * keep[:, None] + plt.dot(weights.astype(v.dtype), v, precision=precision)
    return top, weight * keep + jnp.sum(weights, axis=1), total


def flash_attention(
    query: Array, key: Array, value: Array, past: Past, past_lengths: Array,
    scale: float, softcap: float, window: int, interpret: bool = False,
) -> Array:  # fmt: skip
    """query [B, Hq, Q, D], key [B, Hkv, Q, D], value [B, Hkv, Q, Dv] → [B, Q, Hq, Dv], over cached and new tokens.

    A dummy row attends only to its new tokens. `interpret` runs the kernel in Pallas's interpreter, on any platform.
    """
    batch, heads, length, size = query.shape
    kv_heads, width = key.shape[1], value.shape[3]
    offsets, wraps = ((past[0].offsets or 0), past[0].wraps) if past else (0, False)
    tiling = Tiling(batch, kv_heads, heads // kv_heads, length, size, width, offsets, query.dtype.itemsize, wraps)
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
    built = (batch, length, heads, width)
    shapes = [jax.ShapeDtypeStruct(built, query.dtype)]
    if tiling.splits > 1:
        sums = jax.ShapeDtypeStruct((tiling.splits, *built), jnp.float32)
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
    """Combine the splits' unnormalised sums [splits, …, D], largest scores and weights [splits, …] to [… , D]."""
    share = jnp.exp(tops - jnp.max(tops, axis=0))
    return jnp.sum(sums * share[..., None], axis=0) / jnp.sum(weights * share, axis=0)[..., None]


def _program(*refs: Any, tiling: Tiling, **rule: Any) -> None:
    given = refs if tiling.offsets else (None, None, None, *refs[:3], None, None, *refs[3:])
    program(*given, tiling=tiling, **rule)


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
    """The token position in each of a row's slots; in a ring buffer the last before `past`, negative for none."""
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
