"""The shape of a decoder's cache from its configuration; runtime/cache_shape.py has the contract. The rules come from
transformers 5.23's configuration and modeling files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value

Config: TypeAlias = Mapping[str, Any]
"""A configuration in the terms of config.json, like `Checkpoint.config`."""

SLIDING = "sliding_attention"
"""The member of `layer_types` for layers that see `sliding_window` tokens, including the current one."""
ATTENTION = ("full_attention", "attention")
"""Names of layers that attend: transformers 5's, and that of published configurations."""


def attention_cache(config: Mapping[str, Any]) -> CacheShape:
    """Keys and values of one size in every layer. `sliding_window` applies to the layers that `layer_types` names, or
    to all without that key."""
    types = config.get("layer_types") or [SLIDING] * config["num_hidden_layers"]
    window = config.get("sliding_window") or None
    return _cache(config, [window if kind == SLIDING else None for kind in types])


def late_window_cache(config: Mapping[str, Any]) -> CacheShape:
    """The same, with windows only if `use_sliding_window` is set (Qwen2 and Qwen3): in layers from `max_window_layers`
    on, unless `layer_types` names them."""
    if not config.get("use_sliding_window"):
        return _cache(config, [])
    window = config.get("sliding_window", 4096)
    if config.get("layer_types"):
        return attention_cache({**config, "sliding_window": window})
    first = config.get("max_window_layers", 28)
    return _cache(config, [window if i >= first else None for i in range(config["num_hidden_layers"])])


def types_in_turn(layers: int, every: int, *, first: bool = False) -> list[str]:
    """`layer_types` with one full-attention layer in `every`: the last one of each run, or with `first` the first."""
    shift = 0 if first else 1
    return [SLIDING if (i + shift) % every else "full_attention" for i in range(layers)]


def cache_in_turn(every: int, window: int | None = 4096, *, first: bool = False) -> Callable[[Config], CacheShape]:
    """An architecture's `cache` with one full-attention layer in `every` (see `types_in_turn`), and in the others a
    window, by default `window`. `sliding_window_pattern` overrides the number, `layer_types` the layers."""

    def cache(config: Config) -> CacheShape:
        said = {"sliding_window": window, **config}
        turn = said.get("sliding_window_pattern", every)
        if not said.get("layer_types") and type(turn) is int and turn > 0:
            said["layer_types"] = types_in_turn(said["num_hidden_layers"], turn, first=first)
        return attention_cache(said)

    return cache


def attention_layer(config: Config, layer: int) -> list[CacheTensor]:
    """Keys and values of one layer, without a window."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return list(key_value(layer, config.get("num_key_value_heads") or heads, width))


def hybrid_cache(layers: Sequence[Sequence[CacheTensor]]) -> CacheShape:
    """A cache of layers with these tensors."""
    return CacheShape(len(layers), tuple(tensor for layer in layers for tensor in layer))


def _cache(config: Mapping[str, Any], windows: list[int | None]) -> CacheShape:
    heads = config["num_attention_heads"]
    return CacheShape.plain(
        config["num_hidden_layers"],
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or config["hidden_size"] // heads,
        windows,
    )
