"""The shape of a model's cache: named tensors by layer, in the order of a program's inputs and outputs.

A tensor is of one of two kinds:

  kv     grows by a row of `shape` = (heads, width) with each token. A program takes [B, heads, S, width], S its
         context, and gives the rows of the new tokens, [B, heads, Q, width] (in dialect `fused` the updated cache).
         Keys and values may differ in width, and layers in heads. A layer that reads another layer's keys and values
         has no tensors of its own.
  state  is as large for any number of tokens: `shape` of one sequence, in float32 or what `dtype` says. A program takes
         [B, *shape], and gives what it is after each row's last live token: right padding does not touch it. For a row
         at past 0 the program puts zeros in its place, whatever the input holds. So a program without cache inputs
         starts from zeros, too.

A tensor of kind kv whose layer has a window W may be held in a ring of R ≥ W places: token p lies at place p mod R. Its
input is then [B, heads, min(S, R), width]: place j holds the last token before past_lengths[b] whose number is j mod R,
if there is one. Programs read any such input by that rule, whatever R is, also where every token has a place of its
own; in dialect `fused` they write by it.

A token cannot be taken back out of a state, and a ring forgets the oldest token with each new one. So where a step may
start again is limited (`Rewind`).

The manifest has the tensors as `model.cache`; without it all layers have one key and one value of the same size
(`layers`, `kv_heads`, `head_dim`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

Kind = Literal["kv", "state"]
Dtype = Literal["f32", "f16", "bf16"]
_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
SCALE_BYTES = 2
"""Of the scale that each head's key or value of a token has in a cache in int8."""
_LINES = {**{dtype: (size, 0) for dtype, size in _BYTES.items()}, "int8": (1, SCALE_BYTES)}
"""By the precision of a cache: bytes of a number, and of what a head's key or value of a token has beside them."""
_LARGEST = 1 << 40
"""Values of one token's row or one sequence's state, at most."""
_MEMBERS = {"layer", "name", "kind", "shape", "window", "dtype", "ring"}


@dataclass(frozen=True)
class Rewind:
    """From where on a step may start anew in a slot, besides at 0: after all tokens alone where there are `states`, and
    after those that `rings`, each (window, places), still hold the windows of."""

    states: bool = False
    rings: tuple[tuple[int, int], ...] = ()

    @property
    def free(self) -> bool:
        """Whether a step may start after any token."""
        return not self.states and not self.rings

    @property
    def spare(self) -> int | None:
        """Places of the tightest ring beside its window; None where there is no ring."""
        return min((ring - window for window, ring in self.rings), default=None)

    @property
    def most(self) -> int | None:
        """Tokens that a step may be taken back by; None: any number."""
        return 0 if self.states else self.spare

    def floor(self, end: int) -> int:
        """The lowest start but 0, once token `end` − 1 was written."""
        if self.states:
            return end
        return max((end - ring + window - 1 for window, ring in self.rings if end > ring), default=0)


ANYWHERE = Rewind()
"""Of a cache that holds all tokens."""


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a layer; see the module."""

    layer: int
    name: str
    """"key" and "value" of attention; a state's name in its layer ("conv", "recurrent" …)."""
    kind: Kind
    shape: tuple[int, ...]
    window: int | None = None
    """Of kind kv: a new token sees itself and so many less one before it; None: all."""
    dtype: Dtype | None = None
    """What it is held in; None: the bundle's dtype."""
    ring: int | None = None
    """Of kind kv with a window: the places of its ring; None: each token has a place of its own."""

    @property
    def entry(self) -> str:
        """What programs call it, behind "past_" and "present_": "k3" and "v3" of layer 3, a state's name and layer."""
        short = {("kv", "key"): "k", ("kv", "value"): "v"}.get((self.kind, self.name), self.name)
        return f"{short}{self.layer}"

    @property
    def values(self) -> int:
        """Numbers of one token (kv) or one sequence (state)."""
        return math.prod(self.shape)

    def token_slots(self, tokens: int) -> int:
        """Of kind kv: token slots that hold `tokens` tokens of a sequence, as far as they are held."""
        return tokens if self.ring is None else min(tokens, self.ring)

    def seen(self, tokens: int) -> range:
        """Of kind kv: those of a sequence's `tokens` tokens that a later one may see."""
        return range(0 if self.window is None else max(0, tokens - self.window + 1), tokens)

    def size(self, rows: int, tokens: int) -> tuple[int, ...]:
        """Its shape for `rows` sequences of `tokens` tokens each."""
        if self.kind == "state":
            return (rows, *self.shape)
        return (rows, self.shape[0], self.token_slots(tokens), self.shape[1])

    def to_json(self) -> dict[str, Any]:
        """For manifests and keys, without what is None."""
        fields = {"layer": self.layer, "name": self.name, "kind": self.kind, "shape": list(self.shape)}
        others = ("window", self.window), ("dtype", self.dtype), ("ring", self.ring)
        return fields | {k: v for k, v in others if v is not None}


@dataclass(frozen=True)
class Uniform:
    """A cache whose layers all have a key and a value of one size: tensors [B, kv_heads, S, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def tensors(self) -> int:
        """Keys and values."""
        return 2 * self.layers


@dataclass(frozen=True)
class CacheShape:
    """The cache of a model with `layers` layers; those without a tensor of their own have none in `tensors`, which is
    in the layers' order."""

    layers: int
    tensors: tuple[CacheTensor, ...]

    @classmethod
    def plain(cls, layers: int, kv_heads: int, head_dim: int, windows: Sequence[int | None] = ()) -> CacheShape:
        """A key and a value of one size in each layer; `windows` of the layers, where any has one."""
        kept = windows or [None] * layers
        return cls(layers, tuple(t for i in range(layers) for t in key_value(i, kv_heads, head_dim, window=kept[i])))

    @classmethod
    def from_json(cls, layers: int, tensors: object) -> CacheShape:
        """Of a manifest's `model.cache`; raises ValueError saying what is wrong."""
        if not isinstance(tensors, list):
            raise ValueError("cache is not a list of tensors")
        found = cls(layers, tuple(_tensor(fields, layers) for fields in tensors))
        if len({(t.layer, t.name) for t in found.tensors}) < len(tensors):
            raise ValueError("two tensors of a layer have one name")
        if [t.layer for t in found.tensors] != sorted(t.layer for t in found.tensors):
            raise ValueError("the tensors of its cache are not in the layers' order")
        return found

    def __iter__(self) -> Iterator[CacheTensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def uniform(self) -> Uniform | None:
        """Where every layer has a key, then a value, all of one size and without rings (windows may differ); else
        None."""
        first = self.tensors[0] if self.tensors else None
        if first is None or first.kind != "kv":
            return None
        said = [(t.layer, t.name, t.kind, t.shape, t.dtype, t.ring) for t in self.tensors]
        wanted = [(i, name, "kv", first.shape, None, None) for i in range(self.layers) for name in ("key", "value")]
        return Uniform(self.layers, *first.shape) if said == wanted else None

    @cached_property
    def groups(self) -> tuple[tuple[CacheTensor, ...], ...]:
        """Tensors that may lie in one array, in the order of the first of each: those of one kind, name, size, dtype
        and ring. So a uniform cache has two groups, the keys and the values of all layers."""
        found: dict[object, list[CacheTensor]] = {}
        for t in self.tensors:
            found.setdefault((t.kind, t.name, t.shape, t.dtype, t.ring), []).append(t)
        return tuple(tuple(group) for group in found.values())

    @cached_property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """Where each tensor is in `groups`: which of them, and which tensor there."""
        found = {t: (i, j) for i, group in enumerate(self.groups) for j, t in enumerate(group)}
        return tuple(found[t] for t in self.tensors)

    def of_layer(self, layer: int) -> tuple[CacheTensor, ...]:
        """The tensors of one layer, in order."""
        return tuple(t for t in self.tensors if t.layer == layer)

    def only(self, layers: Sequence[int]) -> CacheShape:
        """That of a model which has these layers alone, numbered anew."""
        kept = [replace(t, layer=i) for i, layer in enumerate(layers) for t in self.of_layer(layer)]
        return CacheShape(len(layers), tuple(kept))

    def in_rings(self, spare: int, longest: int, multiple: int = 1) -> CacheShape:
        """The same with each window in a ring of window + `spare` places or more, a `multiple`, where sequences of
        `longest` tokens do not fit one anyway: a step may be taken back by `spare` tokens. `spare` ≥ 0."""

        def held(t: CacheTensor) -> CacheTensor:
            ring = 0 if t.window is None else math.ceil((t.window + spare) / multiple) * multiple
            return replace(t, ring=ring if 0 < ring < longest else None)

        return CacheShape(self.layers, tuple(map(held, self.tensors)))

    def in_blocks(self, size: int, longest: int) -> CacheShape:
        """The same in rings of whole blocks of `size` tokens, which hold a block or more beside their window."""
        return self.in_rings(size, longest, size)

    @property
    def without_rings(self) -> CacheShape:
        """The same with a place for each token, as the model alone decides it."""
        return CacheShape(self.layers, tuple(replace(t, ring=None) for t in self.tensors))

    @cached_property
    def rewind(self) -> Rewind:
        """From where on a step may start in what was cached before."""
        rings = {(t.window, t.ring) for t in self.tensors if t.window is not None and t.ring is not None}
        return Rewind(bool(self.states), tuple(sorted(rings)))

    @property
    def kv(self) -> tuple[CacheTensor, ...]:
        """Tensors that grow with tokens."""
        return tuple(t for t in self.tensors if t.kind == "kv")

    @property
    def states(self) -> tuple[CacheTensor, ...]:
        """Tensors that do not."""
        return tuple(t for t in self.tensors if t.kind == "state")

    @property
    def token_values(self) -> int:
        """Numbers that one token leaves in the cache, where no window drops any."""
        return sum(t.values for t in self.kv)

    def kv_values(self, tokens: int) -> int:
        """Numbers of places for `tokens` tokens of a sequence, rings with all their places."""
        return sum(t.token_slots(tokens) * t.values for t in self.kv)

    def state_bytes(self, value_bytes: int) -> int:
        """Bytes of one sequence's states, with `value_bytes` a number unless a tensor has a dtype of its own."""
        return sum(t.values * (value_bytes if t.dtype is None else _BYTES[t.dtype]) for t in self.states)

    def nbytes(self, tokens: int, dtype: Dtype, kv_cache: str = "") -> int:
        """Bytes of one sequence of `tokens` tokens, in `dtype` unless a tensor has one of its own; keys and values in
        `kv_cache` ("f16", "int8"…), where that is known."""
        grown = 0
        for t in self.kv:
            number, beside = _LINES[t.dtype or (kv_cache if kv_cache in _LINES else dtype)]
            grown += t.token_slots(tokens) * (t.values * number + t.shape[0] * beside)
        return grown + self.state_bytes(_BYTES[dtype])

    def to_json(self) -> list[dict[str, Any]]:
        """`model.cache` of a manifest."""
        return [t.to_json() for t in self.tensors]


def key_value(
    layer: int, heads: int, width: int, value_width: int | None = None, window: int | None = None
) -> tuple[CacheTensor, CacheTensor]:
    """Key and value of a layer of attention; values are as wide as keys unless `value_width` says otherwise."""
    return (
        CacheTensor(layer, "key", "kv", (heads, width), window),
        CacheTensor(layer, "value", "kv", (heads, value_width or width), window),
    )


def _tensor(fields: object, layers: int) -> CacheTensor:
    if not isinstance(fields, Mapping) or not fields.keys() <= _MEMBERS:
        raise ValueError(f"a tensor of its cache is {fields!r:.80}")
    said: dict[str, Any] = dict(fields)
    layer, name, shape, window, ring = (said.get(n) for n in ("layer", "name", "shape", "window", "ring"))
    kind: Any = said.get("kind")
    dtype: Any = said.get("dtype")
    if (
        type(layer) is not int or not 0 <= layer < layers or not isinstance(name, str) or not 0 < len(name) <= 80
        or kind not in get_args(Kind) or dtype not in (None, *get_args(Dtype)) or not isinstance(shape, list)
        or not all(type(n) is int and n > 0 for n in shape) or not 0 < math.prod(shape) <= _LARGEST
    ):  # fmt: skip
        raise ValueError(f"a tensor of its cache is {fields!r:.80}")
    if kind == "kv" and (len(shape) != 2 or not (window is None or (type(window) is int and window > 0))):
        raise ValueError(f"{name!r} of layer {layer} is no key or value of heads and width: {fields!r:.80}")
    if kind == "state" and window is not None:
        raise ValueError(f"{name!r} of layer {layer} is a state with a window")
    if ring is not None and (window is None or type(ring) is not int or ring < window):
        raise ValueError(f"{name!r} of layer {layer} has a ring that holds no window: {fields!r:.80}")
    return CacheTensor(layer, name, kind, tuple(shape), window, dtype, ring)
