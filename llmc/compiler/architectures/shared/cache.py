"""The shape of a model's cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CacheShape:
    """Layers, key/value heads and head size of a model's cache: tensors [B, kv_heads, S, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> CacheShape:
        """Read the cache's shape from an HF-style configuration."""
        heads = config["num_attention_heads"]
        return cls(
            config["num_hidden_layers"],
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
        )
