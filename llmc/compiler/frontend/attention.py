"""Attention in dialects: how the traced program expresses attention over the cache.

`fused`     one operator `llmc::attention` that appends to the cache and attends to it, for compilers with an
            in-place attention kernel (ONNX Runtime's GroupQueryAttention).
`two_part`  plain tensor operators: scores over the past and over the new tokens side by side, one softmax, two matmuls
            with the values. The cache is read-only and only new keys and values are returned. Portable to any compiler.
`read_only` one operator `llmc::attend` that reads the cache in place, for compilers that receive a kernel of llmc.
            Returns only new keys and values, as `two_part` does. Attention with sinks or ALiBi is that of `two_part`.

Shapes: query [B, Hq, Q, D], key and value [B, Hkv, Q, D], cache [B, Hkv, S, D]; past_lengths [B] counts the tokens of
each row already in the cache. Row b's new token i is at position past_lengths[b] + i. The cache of a layer with a
window is read, and in `fused` written, as a ring buffer over all its token slots (runtime/cache_shape.py). One program
serves both a ring buffer and a cache with a slot for every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmc.runtime.cache_shape import CacheShape, CacheTensor

_DIGITS = 6
"""Exponents are multiples of 8 / heads, rounded up to a power of two; these decimals suffice for 512 heads."""


def slopes_of_heads(slopes: Sequence[float]) -> Tensor:
    """ALiBi slopes [Hq] float32, computed by operators because a traced program holds no constants. They are powers of
    two, whose exponents count up evenly in a few runs."""
    exponents = [round(math.log2(slope), _DIGITS) for slope in slopes]
    parts = [torch.exp2(torch.arange(count) * step + first) for first, step, count in _runs(exponents)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _runs(values: Sequence[float]) -> Iterator[tuple[float, float, int]]:
    """(first, step, count) of each evenly spaced run of values, in order."""
    start = 0
    while start < len(values):
        first = values[start]
        step = values[start + 1] - first if start + 1 < len(values) else 0.0
        end = start + 1
        while end < len(values) and math.isclose(values[end], first + step * (end - start), abs_tol=1e-9):
            end += 1
        yield first, step, end - start
        start = end


Dialect = Literal["fused", "two_part", "read_only"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)


@dataclass
class TraceState:
    """What a layer needs to know about the traced step, and its cache outputs."""

    positions: Tensor
    past_lengths: Tensor
    new_lengths: Tensor
    shape: CacheShape
    cache: Sequence[Tensor]
    """The cache inputs, in the order of `shape`; empty in a program without a cache."""
    new: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _attended: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """Layers with their own keys and values, and the new keys and values that each attended to."""
    _masks: dict[int, Tensor] = field(default_factory=dict)
    """Additive masks over the past of layers with a window, by window."""

    def __post_init__(self) -> None:
        self._given = {(t.layer, t.name): given for t, given in zip(self.shape, self.cache, strict=bool(self.cache))}

    @property
    def capacity(self) -> Any:
        """S, the cache length in tokens of layers without a window, or of the others where there are none; 0 without a
        cache. An int, or a symbol while tracing."""
        lengths = {t.window: g.shape[2] for t, g in zip(self.shape, self.cache, strict=False) if t.kind == "kv"}
        return lengths.get(None, next(iter(lengths.values()), 0))

    def window(self, layer: int) -> int | None:
        """Window of a layer with its own keys and values, or None."""
        return next((t.window for t in self.shape.of_layer(layer) if t.kind == "kv"), None)

    def positions_of_past(self, layer: int, offsets: Any) -> Tensor:
        """Position that each slot of a layer's past holds, [B, slots] or [1, slots]. A slot without a token has −1 or
        less, or past_lengths or more."""
        if self.window(layer) is None:
            return torch.arange(offsets)[None, :]
        return _held(self.past_lengths, offsets)

    def seen_of_past(self, layer: int, offsets: Any, dtype: torch.dtype) -> Tensor:
        """Additive mask over the past of a layer with a window, [B, 1, Q, slots]."""
        window = self.window(layer)
        assert window is not None
        if window not in self._masks:
            at = self.positions_of_past(layer, offsets)[:, None, None, :]
            seen = (at >= 0) & (at > self.positions[:, None, :, None] - window)
            self._masks[window] = _additive(seen, dtype)
        return self._masks[window]

    def past(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return (self._given[layer, "key"], self._given[layer, "value"]) if self.cache else None

    def owner(self, layer: int, key: Tensor, value: Tensor) -> int:
        """The layer whose cache holds the past of these new keys and values: `layer` itself or, for a layer without a
        cache, the earlier layer that attended to the same tensors. Raises ValueError where there is none."""
        if any(t.kind == "kv" for t in self.shape.of_layer(layer)):
            self._attended.append((layer, key, value))
            return layer
        for earlier, its_key, its_value in self._attended:
            if its_key is key and its_value is value:
                return earlier
        raise ValueError(
            f"layer {layer} attends to keys that are in no layer's cache, by the cache shape of its architecture"
        )

    def keep(self, layer: int, owner: int, key: Tensor, value: Tensor) -> None:
        """Keep a layer's new key and value as outputs, unless another layer is their `owner`."""
        if layer == owner:
            self.new[layer, "key"], self.new[layer, "value"] = key, value

    def state(self, layer: int, name: str) -> Tensor | None:
        """Recurrent state before this step, [B, *shape]; None in a program without a cache. Rows at past 0 may hold
        anything."""
        self._tensor(layer, name)
        return self._given[layer, name] if self.cache else None

    def keep_state(self, layer: int, name: str, state: Tensor) -> None:
        """Keep a layer's recurrent state after each row's last live token, [B, *shape]."""
        wanted = self._tensor(layer, name).shape
        if tuple(state.shape[1:]) != wanted:
            raise ValueError(f"state {name} of layer {layer} is {tuple(state.shape)}, its cache [B, {wanted}]")
        self.new[layer, name] = state

    def outputs(self) -> list[Tensor]:
        """The cache outputs in the order of `shape`. Raises ValueError where they are not those that layers wrote."""
        if set(self.new) != {(t.layer, t.name) for t in self.shape}:
            missing = set(self.new) ^ {(t.layer, t.name) for t in self.shape}
            raise ValueError(
                f"the layers' caches differ from the cache shape of the architecture: {sorted(missing)[:3]}"
            )
        return [self.new[t.layer, t.name] for t in self.shape]

    def _tensor(self, layer: int, name: str) -> CacheTensor:
        for tensor in self.shape.of_layer(layer):
            if tensor.name == name and tensor.kind == "state":
                return tensor
        raise ValueError(f"layer {layer} has no state {name!r} in the cache shape of its architecture")


STATE: ContextVar[TraceState] = ContextVar("llmc_trace_state")


class TraceCache:
    """The cache object for transformers: attention reads the real cache from `STATE`, and nothing is concatenated."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, state: TraceState) -> None:
        self._state = state
        self.layers: list[Any] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value

    def get_seq_length(self, *_: Any) -> Any:
        return self._state.capacity

    get_query_offset = get_seq_length
    get_max_cache_shape = get_seq_length

    def get_mask_sizes(self, query: int, *_: Any) -> tuple[Any, int]:
        return self._state.capacity + query, 0

    def __len__(self) -> int:
        return self._state.shape.layers if self._state.cache else 0


@torch.library.custom_op("llmc::attention", mutates_args=())
def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor, past_lengths: Tensor,
    sinks: Tensor | None, scale: float, softcap: float, window: int, slopes: Sequence[float] | None = None,
    by_offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal grouped-query attention over a cache with room for the new tokens; returns (out, new key, new value).

    out is [B, Q, Hq, Dv], where Dv is the width of values. `sinks` [Hq] are the scores of one more key per query head,
    which has no value. The returned caches are copies of the past with rows past_lengths[b] … + Q written. `window` < 0
    means no sliding window, `softcap` 0 none. With `slopes`, one per query head, scores grow by the head's slope with
    each position of a key (ALiBi). With `by_offset` [Hq, P] they grow by the entry of the key's position. With a window
    the cache is a ring buffer of its S slots, which has room for the window and all new tokens but one. This function
    is the operator's reference definition.
    """
    batch, _, length, _ = query.shape
    capacity = past_key.shape[2]
    positions = past_lengths[:, None] + torch.arange(length)
    rows = torch.arange(batch)[:, None]
    new_key, new_value = past_key.clone(), past_value.clone()
    new_key[rows, :, positions % capacity] = key.transpose(1, 2)
    new_value[rows, :, positions % capacity] = value.transpose(1, 2)
    at = _held(past_lengths + length, capacity) if window > 0 else torch.arange(capacity)[None]
    more = sinks, scale, softcap, window, slopes, by_offset
    return _attended(query, new_key, new_value, at, positions, *more), new_key, new_value


def _held(ends: Tensor, offsets: Any) -> Tensor:
    """Last position before ends[b] in each slot of a ring buffer, below 0 where there is none: [B, slots]."""
    last = ends[:, None] - 1
    return last - torch.remainder(last - torch.arange(offsets)[None], offsets)


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, at: Tensor, positions: Tensor, sinks: Tensor | None, scale: float,
    softcap: float, window: int, slopes: Sequence[float] | None = None, by_offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of tokens at `positions` [B, Q] to keys at positions `at` [B or 1, K]; keys below 0 do not exist."""
    seen = (at >= 0)[:, None] & (at[:, None] <= positions[:, :, None])
    if window > 0:
        seen &= at[:, None] > positions[:, :, None] - window
    groups = query.shape[1] // keys.shape[1]
    live = seen.any(1)[:, None, :, None]
    keys = torch.where(live, keys, 0.0).repeat_interleave(groups, 1)
    values = torch.where(live, values, 0.0).repeat_interleave(groups, 1)
    scores = (query * scale) @ keys.transpose(-1, -2)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes:
        scores = scores + torch.tensor(slopes)[:, None, None] * at[:, None, None, :]
    if by_offset is not None:
        scores = scores + _of_offsets(by_offset, at)[:, :, None]
    weights = _shares(scores.masked_fill(~seen[:, None], float("-inf")), sinks).to(values.dtype)
    return (weights @ values).transpose(1, 2).contiguous()


def _of_offsets(by_offset: Tensor, offsets: Tensor) -> Tensor:
    """[B, Hq, K] for offsets [B, K]; padding may lie beyond the last."""
    return by_offset[:, offsets.clamp(0, by_offset.shape[1] - 1)].transpose(0, 1)


def _shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of [B, Hq, Q, K] in float32, with the share of sinks removed."""
    if sinks is None:
        return torch.softmax(scores.float(), -1)
    column = sinks[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1).to(scores.dtype)
    return torch.softmax(torch.cat([scores, column], -1).float(), -1)[..., :-1]


@fused_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    batch, heads, length, _ = query.shape
    return (
        query.new_empty(batch, length, heads, value.shape[3]),
        torch.empty_like(past_key),
        torch.empty_like(past_value),
    )


@torch.library.custom_op("llmc::attend", mutates_args=())
def read_only_attention(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor | None, past_value: Tensor | None,
    past_lengths: Tensor, scale: float, softcap: float, window: int,
) -> Tensor:  # fmt: skip
    """`fused_attention` with a cache that is not written, or without one: out is [B, Q, Hq, Dv]. It has no sinks."""
    positions = past_lengths[:, None] + torch.arange(query.shape[2])
    if past_key is None or past_value is None:
        return _attended(query, key, value, positions, positions, None, scale, softcap, window)
    offsets = past_key.shape[2]
    past = _held(past_lengths, offsets) if window > 0 else torch.arange(offsets).expand(len(positions), -1)
    past = torch.where(past < past_lengths[:, None], past, -1)
    keys, values = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    return _attended(query, keys, values, torch.cat([past, positions], 1), positions, None, scale, softcap, window)


@read_only_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[3])


@torch.library.custom_op("llmc::last_rows", mutates_args=())
def last_rows(hidden: Tensor, new_lengths: Tensor) -> Tensor:
    """Hidden state of each row's last live token: [B, Q, H], [B] → [B, H]."""
    return hidden[torch.arange(hidden.shape[0]), new_lengths - 1]


@last_rows.register_fake
def _(hidden: Tensor, new_lengths: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[2])


def _fused(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, sliding_window: int | None = None,
    s_aux: Tensor | None = None, slopes: Sequence[float] = (), by_offset: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    state = STATE.get()
    layer = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    owner = state.owner(layer, key, value)
    past = state.past(owner)
    assert past is not None  # programs of this dialect have a cache
    out, *kept = torch.ops.llmc.attention(
        query, key, value, *past, state.past_lengths, s_aux, float(scale), float(softcap or 0.0),
        int(sliding_window or -1), **({"slopes": list(slopes)} if slopes else {}),
        **({} if by_offset is None else {"by_offset": by_offset}),
    )  # fmt: skip
    state.keep(layer, owner, *kept)
    return out, None


def _read_only(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, sliding_window: int | None = None,
    s_aux: Tensor | None = None, slopes: Sequence[float] = (), by_offset: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if s_aux is not None or slopes or by_offset is not None:
        mask = _two_part_mask(query.shape[0], query.shape[2], 0, _causal(sliding_window), query.dtype)
        return _two_part(module, query, key, value, mask, scaling, softcap, s_aux, slopes, by_offset)
    state = STATE.get()
    owner = state.owner(module.layer_idx, key, value)
    state.keep(module.layer_idx, owner, key, value)
    past = state.past(owner) or (None, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.ops.llmc.attend(
        query, key, value, *past, state.past_lengths, float(scale), float(softcap or 0.0), int(sliding_window or -1)
    )
    return out, None


def _two_part(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    slopes: Sequence[float] = (), by_offset: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    state = STATE.get()
    layer = module.layer_idx
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    scale = head_dim**-0.5 if scaling is None else scaling
    owner = state.owner(layer, key, value)
    state.keep(layer, owner, key, value)
    grouped = (query * scale).reshape(batch, kv_heads, heads // kv_heads * length, head_dim)
    scores = grouped @ key.transpose(-1, -2)
    capacity, past = 0, state.past(owner)
    if past is not None:
        past_key, past_value = past
        capacity = past_key.shape[2]
        at = state.positions_of_past(owner, capacity)
        # slots without a token may hold anything, NaN included: they are replaced, not masked, because 0 × NaN is NaN
        live = ((at >= 0) & (at < state.past_lengths[:, None]))[:, None, :, None]
        past_key, past_value = torch.where(live, past_key, 0.0), torch.where(live, past_value, 0.0)
        if attention_mask is not None and state.window(owner) is not None:
            new = attention_mask.narrow(-1, attention_mask.shape[-1] - length, length)
            attention_mask = torch.cat([state.seen_of_past(owner, capacity, new.dtype), new], -1)
        scores = torch.cat([grouped @ past_key.transpose(-1, -2), scores], -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(batch, kv_heads, heads // kv_heads, length, -1)
    if slopes or by_offset is not None:
        offsets = state.positions
        if past is not None:
            offsets = torch.cat([state.positions_of_past(owner, capacity).expand(batch, -1), offsets], -1)
        if by_offset is None:
            grown = slopes_of_heads(slopes).view(kv_heads, -1, 1, 1) * offsets[:, None, None, None]
        else:
            grown = _of_offsets(by_offset, offsets).reshape(batch, kv_heads, heads // kv_heads, 1, -1)
        scores = scores + grown.to(scores.dtype)
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, None]
    weights = _shares(scores.reshape(batch, heads, length, -1), s_aux).to(value.dtype)
    weights = weights.reshape(batch, kv_heads, heads // kv_heads * length, -1)
    out = weights[..., capacity:] @ value
    if past is not None:
        out = out + weights[..., :capacity] @ past_value
    return out.view(batch, heads, length, -1).transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _two_part_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Tensor],
    dtype: torch.dtype = torch.float32, local_size: int | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Additive mask [B, 1, Q, S + Q]: the model's own rule at absolute positions, and nothing past the live length.

    For layers with a window, [B, 1, Q, Q], because `seen_of_past` masks their past.
    """
    state = STATE.get()
    query_position = state.positions[:, None, :, None]
    rows = torch.arange(batch_size)[:, None, None, None]
    head = torch.zeros((), dtype=torch.long)
    allowed = mask_function(rows, head, query_position, state.positions[:, None, None, :])
    capacity = state.capacity
    if capacity and local_size is None:
        slots = torch.arange(capacity)[None, None, None, :]
        past = mask_function(rows, head, query_position, slots) & (slots < state.past_lengths[:, None, None, None])
        allowed = torch.cat(
            [past.expand(batch_size, 1, q_length, capacity), allowed.expand(batch_size, 1, q_length, q_length)], -1
        )
    return _additive(allowed, dtype)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(allowed, torch.zeros((), dtype=dtype), torch.full((), torch.finfo(dtype).min, dtype=dtype))


def _causal(window: int | None) -> Callable[..., Tensor]:
    def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window) if window else key <= query

    return seen


def attention_name(dialect: Dialect) -> str:
    """The name of a dialect's attention function in transformers' registry."""
    return f"llmc_{dialect}"


ALL_ATTENTION_FUNCTIONS.register(attention_name("fused"), _fused)
ALL_MASK_ATTENTION_FUNCTIONS.register(attention_name("fused"), _no_mask)
ALL_ATTENTION_FUNCTIONS.register(attention_name("read_only"), _read_only)
ALL_MASK_ATTENTION_FUNCTIONS.register(attention_name("read_only"), _no_mask)
ALL_ATTENTION_FUNCTIONS.register(attention_name("two_part"), _two_part)
ALL_MASK_ATTENTION_FUNCTIONS.register(attention_name("two_part"), _two_part_mask)
