"""Steps and slot operations as JAX functions over a cache that stays on the device, updated in place.

    step(token_ids [B, Q], past_lengths [B], new_lengths [B], slots [B], *adapters, *cache, *weights)
        → logits [B, V] float32, with `top` the largest of them and their ids, *cache

`cache` has an array for each of `CacheShape.groups`: keys and values [layers, slots, kv_heads, offsets, head_dim], with
an offset for each token or in a ring buffer, recurrent states [layers, slots, …]. The arrays are donated and updated in
place: the step adds the live tokens and replaces the states of live rows. Integers are int32. Row b belongs to slot
slots[b]; −1 marks a dummy row, which writes nothing. A decode step's row b is slot b, so that its cache is a slice and
no gather. A model with adapters to choose from takes one more input, adapters [B], each row's adapter.

A program over weights in 8 bits (`QuantisedCore`) reads two inputs as one matrix (formats.py).

`encode_job` is the same for a model without a cache:

    encode(token_ids [B, T], lengths [B], type_ids [B, T] where the model has segments, *weights)
        → hidden states [B, T, H], or logits [B, labels], float32

Integers are int32. Nothing is donated: a program of frontend/encode.py keeps nothing between calls.

`slot_programs` are the programs for cache slots between steps. All take the cache's arrays first; all but `slot_read`
update them in place. Numbers are int32 scalars. A recurrent state is copied with any number of tokens.

    slot_copy(*cache, source, target, length)    copies a slot's first `length` offsets and its states to another slot
    slot_fill(*cache, slot, start, used, value)  writes `value` (float32) from token `start` on, in a slot that has had
                                                 `used` tokens; in states where `start` is 0
    slot_read(*cache, slot)                      → a slot's part of each array: [layers, kv_heads, offsets, head_dim]
                                                   or [layers, …]
    slot_write(*cache, slot, length, *rows)      writes the first `length` offsets of such rows, and their states, to a
                                                 slot
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax

from llmc.compiler.checkpoint.adapter_layout import ADAPTERS
from llmc.compiler.program.sized import BoundProgram, TracedProgram
from llmc.compiler.targets.xla.build import XlaJob
from llmc.compiler.targets.xla.cache_view import CacheView
from llmc.compiler.targets.xla.operators import Quantised, evaluate
from llmc.compiler.weights.stage import SCALE
from llmc.runtime.executors.base import LENGTHS
from llmc.runtime.executors.xla.envelope import Tensor

if TYPE_CHECKING:
    from llmc.compiler.targets.xla.capacity import ArrayKind
    from llmc.compiler.weights.stage import Described

Array = Any
Read = Callable[[int, Any], Any]
"""Maps a group and an index in it (a number, or traced) to the rows' part of that tensor, or to a view.

Keys and values are [B, kv_heads, S, head_dim], recurrent states [B, …].
"""
Given = Mapping[str, Any]
"""A program's inputs before its cache, by name (BoundProgram.takes)."""
Offsets = Sequence[tuple[int, int]]
"""Group, and index in it, of each of a program's cache tensors, in its order."""


class CoreOutput(NamedTuple):
    """Logits, the largest of them if requested, and the new entries of each group.

    Keys and values are [layers, B, H, Q, D], recurrent states [layers, B, …].
    """

    logits: Array
    top: tuple[Array, ...]
    entries: tuple[Array, ...]


class Core(Protocol):
    """A step without its cache."""

    @property
    def weights(self) -> Sequence[str]:
        """Names of the weights that `run` takes, in order."""

    def run(self, given: Given, read: Read, weights: Sequence[Array]) -> CoreOutput:
        """Return logits and new cache entries."""


class FlatCore:
    """A program run layer by layer, as it was traced. By default keys and values alternate in `offsets`."""

    def __init__(self, program: BoundProgram, offsets: Offsets | None = None) -> None:
        self._program = program
        self._offsets = in_turn(len(program.new_entries)) if offsets is None else offsets
        self.weights = list(program.weights.values())

    def run(self, given: Given, read: Read, weights: Sequence[Array]) -> CoreOutput:
        program = self._program
        values = dict(given)
        values |= dict(zip(program.weights, weights, strict=True))
        if program.cache:
            values |= {name: read(*at) for name, at in zip(program.cache, self._offsets, strict=True)}
        evaluate(program, program.operations, values)
        logits, *top = (values[name] for name in program.outputs[: 3 if program.top else 1])
        return CoreOutput(logits, tuple(top), stacked([values[name] for name in program.new_entries], self._offsets))


def in_turn(tensors: int) -> Offsets:
    """Return the offsets of alternating keys and values of one size."""
    return [(i % 2, i // 2) for i in range(tensors)]


def stacked(entries: Sequence[Array], offsets: Offsets) -> tuple[Array, ...]:
    """Stack new entries in a program's order to one array a group."""
    groups: dict[int, list[Array]] = {}
    for entry, (group, _) in zip(entries, offsets, strict=True):
        groups.setdefault(group, []).append(entry)
    return tuple(jnp.stack(groups[i]) for i in range(len(groups)))


def step_function(
    core: Core, phase: str, context: int, loops: bool = True, views: bool = False, dtype: str | None = None,
    kinds: Sequence[ArrayKind] = ("kv", "kv"), adapted: bool = False,
) -> Callable[..., tuple[Array, ...]]:  # fmt: skip
    """Build the step of a bucket (module docstring).

    loops      False: rows are written one after the other by separate operations, for compilers without loops
    views      the core's operators read the cache in place (a program of dialect `read_only`)
    dtype      what the core computes in, where keys and values are held in another; states are held as the core
               takes them
    kinds      those of the cache's arrays
    adapted    the step takes adapters
    """

    def step(
        token_ids: Array, past_lengths: Array, new_lengths: Array, slots: Array, *rest: Array
    ) -> tuple[Array, ...]:
        given = {"token_ids": token_ids, "past_lengths": past_lengths, "new_lengths": new_lengths}
        arrays = list(rest)
        if adapted:
            chosen = arrays.pop(0)
            given[ADAPTERS] = jnp.broadcast_to(chosen[:, None], token_ids.shape)
        cache, weights = arrays[: len(kinds)], arrays[len(kinds) :]

        def read(group: int, index: Any) -> Any:
            if kinds[group] == "state":
                return CacheView(cache[group], index, slots, phase, None).rows()
            offsets = min(context, cache[group].shape[3])
            view = CacheView(cache[group], index, slots, phase, offsets, wraps=offsets < context)
            if views:
                return view
            return view.rows() if dtype is None else view.rows().astype(dtype)

        out = core.run(given, read, weights)
        live = jnp.where(slots >= 0, new_lengths, 0)
        # adds 0, computed from the logits: all reads of the cache then precede the writes, and XLA copies nothing
        after = (out.logits.ravel()[0] > jnp.inf).astype(jnp.int32)
        first = jnp.maximum(slots, 0)
        written = [
            _replace(held, new, first + after, live, loops) if kind == "state"
            else _write(held, new, first, past_lengths + after, live, loops, kind == "ring")
            for kind, held, new in zip(kinds, cache, out.entries, strict=True)
        ]  # fmt: skip
        top = () if not out.top else (out.top[0].astype(jnp.float32), out.top[1].astype(jnp.int32))
        return out.logits.astype(jnp.float32), *top, *written

    return step


def _held(new: Array, dtype: Any) -> Array:
    """Converted to a cache's `dtype`; in 8 bits, numbers beyond its range are clipped."""
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        new = jnp.clip(new, -largest, largest)
    return new.astype(dtype)


def _write(cache: Array, new: Array, slots: Array, past: Array, live: Array, loops: bool, ring: bool) -> Array:
    """`cache` with the first live[b] of row b's new tokens at slot slots[b], token past[b] on.

    `new` is [layers, B, kv_heads, Q, head_dim]. A row's window of Q offsets is read, changed where tokens are live, and
    written back. A window that would pass the end of the cache is moved back, and its tokens forward in it; in a ring
    buffer they wrap to its beginning, and of more tokens than it has offsets the last live ones are taken.
    """
    layers, batch, heads, query, size = new.shape
    new, offsets = _held(new, cache.dtype), cache.shape[3]
    taken = min(query, offsets)

    def row(b: Array, cache: Array) -> Array:
        first = jnp.maximum(live[b] - taken, 0) if ring else jnp.int32(0)
        begin = lax.rem(past[b] + first, offsets) if ring else past[b]
        start = jnp.minimum(begin, offsets - taken)
        ahead = begin - start
        built = lax.dynamic_slice(new, (0, b, 0, first, 0), (layers, 1, heads, taken, size))
        if taken > 1:
            built = jnp.roll(built, ahead, axis=3)
        token = first + jnp.arange(taken) - ahead

        def put(cache: Array, start: Any, kept: Array) -> Array:
            at = (0, slots[b], 0, start, 0)
            held = lax.dynamic_slice(cache, at, built.shape)
            return lax.dynamic_update_slice(cache, jnp.where(kept[:, None], built, held), at)

        cache = put(cache, start, (token >= first) & (token < live[b]))
        if ring and taken > 1:
            cache = put(cache, 0, (token < first) & (token + taken < live[b]))
        return cache

    return _each(batch, row, cache, loops)


def _replace(cache: Array, new: Array, slots: Array, live: Array, loops: bool) -> Array:
    new = new.astype(cache.dtype)
    batch, inner = new.shape[1], new.shape[2:]
    sizes, start = (new.shape[0], 1, *inner), (0,) * len(inner)

    def row(b: Array, cache: Array) -> Array:
        at = (0, slots[b], *start)
        held, built = lax.dynamic_slice(cache, at, sizes), lax.dynamic_slice(new, (0, b, *start), sizes)
        return lax.dynamic_update_slice(cache, jnp.where(live[b] > 0, built, held), at)

    return _each(batch, row, cache, loops)


def _each(batch: int, row: Callable[[Any, Array], Array], cache: Array, loops: bool) -> Array:
    if loops:
        written: Array = lax.fori_loop(0, batch, row, cache)
        return written
    for b in range(batch):
        cache = row(b, cache)
    return cache


class WeightInputs:
    """The weights that a program reads, some of them as two inputs: quantized weights, followed by scales."""

    def __init__(self, read: Sequence[str], weights: Collection[str]) -> None:
        """`weights`: the names of all inputs that are weights, scales included."""
        self._scaled = [name + SCALE in weights for name in read]
        self.names = [
            part
            for name, scaled in zip(read, self._scaled, strict=True)
            for part in ((name, name + SCALE) if scaled else (name,))
        ]

    def joined(self, given: Sequence[Array]) -> list[Any]:
        rest = iter(given)
        return [Quantised(next(rest), next(rest)) if scaled else next(rest) for scaled in self._scaled]


class QuantisedCore:
    """A core, some of whose weights are in two `Parts`."""

    def __init__(self, core: Core, weights: Collection[str]) -> None:
        self._core = core
        self._parts = WeightInputs(core.weights, weights)
        self.weights = self._parts.names

    def run(self, given: Given, read: Read, weights: Sequence[Array]) -> CoreOutput:
        return self._core.run(given, read, self._parts.joined(weights))


def encode_job(
    program: bytes, inputs: Sequence[str], described: Sequence[Described], batch: int, tokens: int
) -> XlaJob:
    """Build the job for `batch` texts of `tokens` tokens. Raises CompileError where a guard of the trace fails."""
    bound = TracedProgram.parse(program, inputs).at(batch, tokens, 0)
    weights = {d["name"]: _whole(d["name"], d["shape"], d["dtype"]) for d in described}
    parts = WeightInputs(list(bound.weights.values()), weights)

    def encode(*arrays: Array) -> tuple[Array]:
        given, held = arrays[: len(inputs)], parts.joined(arrays[len(inputs) :])
        values = dict(zip((*inputs, *bound.weights), (*given, *held), strict=True))
        return (evaluate(bound, bound.operations, values)[bound.outputs[0]].astype(jnp.float32),)

    shapes = {name: (batch,) if name == LENGTHS else (batch, tokens) for name in inputs}
    given = [_whole(name, shape, "int32") for name, shape in shapes.items()]
    taken = (*given, *(weights[name] for name in parts.names))
    return XlaJob("encode", encode, taken, (), f"encode batch={batch} query={tokens}")


def _whole(name: str, shape: Sequence[int], dtype: str) -> Tensor:
    return Tensor(name, tuple(shape), dtype, (None,) * len(shape))


def slot_programs(
    cache: Sequence[Tensor], kinds: Sequence[ArrayKind]
) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], bool]]:
    """Return each program by name: its function, inputs, and whether it changes the cache."""
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
