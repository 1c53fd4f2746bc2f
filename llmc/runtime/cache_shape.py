"""The shape of a model's cache: named tensors by layer, in the order of a program's inputs and outputs.

Tensors have one of two kinds:

  kv     grows by one row of `shape` = (heads, width) per token. A program takes [B, heads, S, width], where S is its
         context, and returns the new tokens' rows, [B, heads, Q, width] (dialect `fused`: the updated cache). Keys and
         values may differ in width, and layers in heads. A layer that reuses another layer's keys and values has no
         tensors of its own.
  state  has a fixed size: `shape` per sequence, in float32 or `dtype`. A program takes [B, *shape] and returns the
         state after each row's last live token; right padding does not affect it. For a row at past 0, the program
         replaces the input with zeros. A program without cache inputs therefore also starts from zeros.

A kv tensor of a layer with window W may use a ring buffer of R ≥ W token slots: token p is in slot p mod R. Its input
is then [B, heads, min(S, R), width]; slot j holds the last token before past_lengths[b] whose position is j mod R, if
there is one. Programs read every such input by this rule for any R, even without a ring buffer. In dialect `fused` they
also write by it.

A state cannot drop a token, and each new token overwrites the oldest one in a ring buffer. `Rewind` states where a step
may therefore restart.

The manifest stores the tensors as `model.cache`. Without that field, all layers have one key and one value of the same
size (`layers`, `kv_heads`, `head_dim`).
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
"""Bytes of the scale stored with each head's key or value of a token in an int8 cache."""
_LINES = {**{dtype: (size, 0) for dtype, size in _BYTES.items()}, "int8": (1, SCALE_BYTES)}
"""By cache dtype: bytes per number, and extra bytes per head's key or value of a token."""
_LARGEST = 1 << 40
"""The largest number of values in one token's row or one sequence's state."""
_MEMBERS = {"layer", "name", "kind", "shape", "window", "dtype", "ring"}


@dataclass(frozen=True)
class Rewind:
    """Where a step may restart in a slot, in addition to token 0.

    With recurrent `states` it may only continue after all tokens. Each ring buffer in `rings`, a (window, token slots)
    pair, must still hold the window before the start.
    """

    states: bool = False
    rings: tuple[tuple[int, int], ...] = ()

    @property
    def free(self) -> bool:
        """Whether a step may start after any token."""
        return not self.states and not self.rings

    @property
    def spare(self) -> int | None:
        """Token slots of the tightest ring buffer beyond its window; None without ring buffers."""
        return min((ring - window for window, ring in self.rings), default=None)

    @property
    def most(self) -> int | None:
        """The largest number of tokens that a step may be taken back by; None: no limit."""
        return 0 if self.states else self.spare

    def floor(self, end: int) -> int:
        """The lowest start other than 0, after token `end` − 1 was written."""
        if self.states:
            return end
        return max((end - ring + window - 1 for window, ring in self.rings if end > ring), default=0)


ANYWHERE = Rewind()
"""For a cache that keeps all tokens."""


@dataclass(frozen=True)
class CacheTensor:
    """One cache tensor of a layer. The module docstring defines the kinds."""

    layer: int
    name: str
    """"key" and "value" for attention; otherwise the state's name in its layer ("conv", "recurrent" …)."""
    kind: Kind
    shape: tuple[int, ...]
    window: int | None = None
    """Kind kv: a token attends to itself and up to window − 1 earlier tokens. None: all."""
    dtype: Dtype | None = None
    """Stored dtype. None: the bundle's dtype."""
    ring: int | None = None
    """Kind kv with a window: token slots of its ring buffer. None: every token has its own slot."""

    @property
    def entry(self) -> str:
        """Name in programs, after "past_" and "present_": "k3" and "v3" for layer 3, or a state's name and layer."""
        short = {("kv", "key"): "k", ("kv", "value"): "v"}.get((self.kind, self.name), self.name)
        return f"{short}{self.layer}"

    @property
    def values(self) -> int:
        """Number of values per token (kv) or per sequence (state)."""
        return math.prod(self.shape)

    def token_slots(self, tokens: int) -> int:
        """Kind kv: token slots needed for a sequence of `tokens` tokens."""
        return tokens if self.ring is None else min(tokens, self.ring)

    def seen(self, tokens: int) -> range:
        """Kind kv: the range of a sequence's `tokens` tokens that a later token may attend to."""
        return range(0 if self.window is None else max(0, tokens - self.window + 1), tokens)

    def size(self, rows: int, tokens: int) -> tuple[int, ...]:
        """Array shape for `rows` sequences of `tokens` tokens each."""
        if self.kind == "state":
            return (rows, *self.shape)
        return (rows, self.shape[0], self.token_slots(tokens), self.shape[1])

    def to_json(self) -> dict[str, Any]:
        """JSON for manifests and keys, without fields that are None."""
        fields = {"layer": self.layer, "name": self.name, "kind": self.kind, "shape": list(self.shape)}
        others = ("window", self.window), ("dtype", self.dtype), ("ring", self.ring)
        return fields | {k: v for k, v in others if v is not None}


@dataclass(frozen=True)
class Uniform:
    """A cache whose layers all have one key and one value of the same size: tensors [B, kv_heads, S, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def tensors(self) -> int:
        """Number of tensors: one key and one value per layer."""
        return 2 * self.layers


@dataclass(frozen=True)
class CacheShape:
    """The cache of a model with `layers` layers. `tensors` are in layer order; some layers have none."""

    layers: int
    tensors: tuple[CacheTensor, ...]

    @classmethod
    def plain(cls, layers: int, kv_heads: int, head_dim: int, windows: Sequence[int | None] = ()) -> CacheShape:
        """A shape with a key and a value of one size in each layer; `windows` has each layer's window, if any."""
        kept = windows or [None] * layers
        return cls(layers, tuple(t for i in range(layers) for t in key_value(i, kv_heads, head_dim, window=kept[i])))

    @classmethod
    def from_json(cls, layers: int, tensors: object) -> CacheShape:
        """Parse a manifest's `model.cache`; raises ValueError naming the problem."""
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
        """The uniform shape if every layer has a key and a value of one size and no ring buffer, otherwise None.

        Windows may differ between layers.
        """
        first = self.tensors[0] if self.tensors else None
        if first is None or first.kind != "kv":
            return None
        said = [(t.layer, t.name, t.kind, t.shape, t.dtype, t.ring) for t in self.tensors]
        wanted = [(i, name, "kv", first.shape, None, None) for i in range(self.layers) for name in ("key", "value")]
        return Uniform(self.layers, *first.shape) if said == wanted else None

    @cached_property
    def groups(self) -> tuple[tuple[CacheTensor, ...], ...]:
        """Tensors that may share one array, in the order of each group's first: equal kind, name, size, dtype and ring.

        A uniform cache has two groups: the keys and the values of all layers.
        """
        found: dict[object, list[CacheTensor]] = {}
        for t in self.tensors:
            found.setdefault((t.kind, t.name, t.shape, t.dtype, t.ring), []).append(t)
        return tuple(tuple(group) for group in found.values())

    @cached_property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """For each tensor, its group index and its index in that group."""
        found = {t: (i, j) for i, group in enumerate(self.groups) for j, t in enumerate(group)}
        return tuple(found[t] for t in self.tensors)

    def of_layer(self, layer: int) -> tuple[CacheTensor, ...]:
        """The tensors of one layer, in order."""
        return tuple(t for t in self.tensors if t.layer == layer)

    def only(self, layers: Sequence[int]) -> CacheShape:
        """The shape of a model that has only these layers, renumbered from 0."""
        kept = [replace(t, layer=i) for i, layer in enumerate(layers) for t in self.of_layer(layer)]
        return CacheShape(len(layers), tuple(kept))

    def in_rings(self, spare: int, longest: int, multiple: int = 1) -> CacheShape:
        """Replace each window with a ring buffer of at least window + `spare` token slots, rounded up to `multiple`.

        Windows that hold whole sequences of `longest` tokens stay as they are. A step may then be taken back by `spare`
        ≥ 0 tokens.
        """

        def held(t: CacheTensor) -> CacheTensor:
            ring = 0 if t.window is None else math.ceil((t.window + spare) / multiple) * multiple
            return replace(t, ring=ring if 0 < ring < longest else None)

        return CacheShape(self.layers, tuple(map(held, self.tensors)))

    def in_blocks(self, size: int, longest: int) -> CacheShape:
        """Replace windows with ring buffers of whole blocks of `size` tokens, at least one block beyond the window."""
        return self.in_rings(size, longest, size)

    @property
    def without_rings(self) -> CacheShape:
        """The same shape with one slot per token, as the model alone defines it."""
        return CacheShape(self.layers, tuple(replace(t, ring=None) for t in self.tensors))

    @cached_property
    def rewind(self) -> Rewind:
        """Where a step may restart in cached tokens."""
        rings = {(t.window, t.ring) for t in self.tensors if t.window is not None and t.ring is not None}
        return Rewind(bool(self.states), tuple(sorted(rings)))

    @property
    def kv(self) -> tuple[CacheTensor, ...]:
        """Tensors that grow with the number of tokens."""
        return tuple(t for t in self.tensors if t.kind == "kv")

    @property
    def states(self) -> tuple[CacheTensor, ...]:
        """Tensors of fixed size."""
        return tuple(t for t in self.tensors if t.kind == "state")

    @property
    def token_values(self) -> int:
        """Number of values that one token adds to the cache, ignoring windows."""
        return sum(t.values for t in self.kv)

    def kv_values(self, tokens: int) -> int:
        """Number of kv values allocated for a sequence of `tokens` tokens, including all ring-buffer slots."""
        return sum(t.token_slots(tokens) * t.values for t in self.kv)

    def state_bytes(self, value_bytes: int) -> int:
        """Bytes of one sequence's states, at `value_bytes` per value unless a tensor has its own dtype."""
        return sum(t.values * (value_bytes if t.dtype is None else _BYTES[t.dtype]) for t in self.states)

    def nbytes(self, tokens: int, dtype: Dtype, kv_cache: str = "") -> int:
        """Bytes of one sequence of `tokens` tokens, in `dtype` unless a tensor has its own.

        `kv_cache` ("f16", "int8"…) is the dtype of keys and values, if known.
        """
        grown = 0
        for t in self.kv:
            number, beside = _LINES[t.dtype or (kv_cache if kv_cache in _LINES else dtype)]
            grown += t.token_slots(tokens) * (t.values * number + t.shape[0] * beside)
        return grown + self.state_bytes(_BYTES[dtype])

    def to_json(self) -> list[dict[str, Any]]:
        """The manifest's `model.cache`."""
        return [t.to_json() for t in self.tensors]


def key_value(
    layer: int, heads: int, width: int, value_width: int | None = None, window: int | None = None
) -> tuple[CacheTensor, CacheTensor]:
    """Create an attention layer's key and value; `value_width` defaults to the key width."""
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
        raise ValueError(f"{name!r} of layer {layer} is not a key or value with heads and width: {fields!r:.80}")
    if kind == "state" and window is not None:
        raise ValueError(f"{name!r} of layer {layer} is a state with a window")
    if ring is not None and (window is None or type(ring) is not int or ring < window):
        raise ValueError(f"{name!r} of layer {layer} has a ring buffer that does not hold its window: {fields!r:.80}")
    return CacheTensor(layer, name, kind, tuple(shape), window, dtype, ring)
