"""One bucket's step as a JAX function: the program over a cache that stays on the device, updated in place.

    step(token_ids [B, Q], past_lengths [B], new_lengths [B], slots [B], keys, values, *weights)
        → logits [B, V] float32, with `top` the largest of them and their ids, keys, values

`keys` and `values` [layers, slots, kv_heads, capacity, head_dim] are donated: what comes back lies where they lay, and
holds, beside what it held, the live tokens of the live rows. Integers are int32. Row b belongs to slot slots[b]; −1
marks a dummy row, which writes nothing. A decode step's row b is slot b, so that its cache is a slice and no gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax

from llmc.compiler.program.sized import BoundProgram
from llmc.compiler.targets.xla.attention.cache_view import CacheView
from llmc.compiler.targets.xla.evaluate import evaluate

Array = Any
Read = Callable[[Any], tuple[Any, Any]]
"""From a layer's index (a number, or traced) to key and value of the rows, [B, kv_heads, S, head_dim], or to views."""


class Outcome(NamedTuple):
    """What a core returns: logits, the largest of them if asked for, and new keys and values [layers, B, H, Q, D]."""

    logits: Array
    top: tuple[Array, ...]
    keys: Array
    values: Array


class Core(Protocol):
    """A step without its cache."""

    @property
    def weights(self) -> Sequence[str]:
        """Names of the weights that `run` takes, in order."""

    def run(
        self, token_ids: Array, past_lengths: Array, new_lengths: Array, read: Read, weights: Sequence[Array]
    ) -> Outcome:
        """Logits and new cache entries."""


class FlatCore:
    """A program run layer after layer, as it was traced."""

    def __init__(self, program: BoundProgram) -> None:
        self._program = program
        self.weights = list(program.weights.values())

    def run(
        self, token_ids: Array, past_lengths: Array, new_lengths: Array, read: Read, weights: Sequence[Array]
    ) -> Outcome:
        """See `Core.run`."""
        program = self._program
        values = {"token_ids": token_ids, "past_lengths": past_lengths, "new_lengths": new_lengths}
        values |= dict(zip(program.weights, weights, strict=True))
        for layer in range(len(program.cache) // 2):
            values[program.cache[2 * layer]], values[program.cache[2 * layer + 1]] = read(layer)
        evaluate(program, program.operations, values)
        logits, *top = (values[name] for name in program.outputs[: 3 if program.top else 1])
        new = [values[name] for name in program.new_entries]
        return Outcome(logits, tuple(top), jnp.stack(new[::2]), jnp.stack(new[1::2]))


def step_function(
    core: Core, phase: str, context: int, loops: bool = True, views: bool = False, dtype: str | None = None
) -> Callable[..., tuple[Array, ...]]:
    """The step of a bucket; see the module's docstring. Without `loops`, rows are written one after the other by
    operations of their own, for compilers that know no loops. With `views` the core's operators read the cache where it
    lies (a program of dialect `read_only`). `dtype`: what the core computes in, where the cache is of another.
    """

    def step(
        token_ids: Array, past_lengths: Array, new_lengths: Array, slots: Array, keys: Array, values: Array,
        *weights: Array,
    ) -> tuple[Array, ...]:  # fmt: skip

        def read(layer: Any) -> tuple[Any, Any]:
            found = CacheView(keys, layer, slots, phase, context), CacheView(values, layer, slots, phase, context)
            if views:
                return found
            key, value = (view.rows() for view in found)
            return (key, value) if dtype is None else (key.astype(dtype), value.astype(dtype))

        out = core.run(token_ids, past_lengths, new_lengths, read, weights)
        live = jnp.where(slots >= 0, new_lengths, 0)
        # adds 0, computed from the logits: so all reads of the cache come before the writes, and XLA copies nothing
        past_lengths = past_lengths + (out.logits.ravel()[0] > jnp.inf).astype(jnp.int32)
        places = (jnp.maximum(slots, 0), past_lengths, live)
        written = _write(keys, out.keys, *places, loops), _write(values, out.values, *places, loops)
        top = () if not out.top else (out.top[0].astype(jnp.float32), out.top[1].astype(jnp.int32))
        return out.logits.astype(jnp.float32), *top, *written

    return step


def _held(new: Array, dtype: Any) -> Array:
    """As a cache of `dtype` holds it; of 8 bits, numbers beyond its range are its largest."""
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        new = jnp.clip(new, -largest, largest)
    return new.astype(dtype)


def _write(cache: Array, new: Array, slots: Array, past: Array, live: Array, loops: bool) -> Array:
    """`cache` with the first live[b] of row b's new tokens at slot slots[b], token past[b] on.

    `new` is [layers, B, kv_heads, Q, head_dim]. A row's window of Q tokens is read, changed where tokens are live, and
    written back. A window that would pass the end of the cache is moved back, and its tokens ahead in it.
    """
    layers, batch, heads, query, size = new.shape
    new = _held(new, cache.dtype)

    def row(b: Array, cache: Array) -> Array:
        start = jnp.minimum(past[b], cache.shape[3] - query)
        ahead = past[b] - start
        at = (0, slots[b], 0, start, 0)
        held = lax.dynamic_slice(cache, at, (layers, 1, heads, query, size))
        made = lax.dynamic_slice(new, (0, b, 0, 0, 0), (layers, 1, heads, query, size))
        if query > 1:
            made = jnp.roll(made, ahead, axis=3)
        token = jnp.arange(query) - ahead
        kept = ((token >= 0) & (token < live[b]))[:, None]
        return lax.dynamic_update_slice(cache, jnp.where(kept, made, held), at)

    if loops:
        written: Array = lax.fori_loop(0, batch, row, cache)
        return written
    for b in range(batch):
        cache = row(b, cache)
    return cache
