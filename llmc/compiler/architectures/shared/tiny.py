"""What the families' tiny configurations have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WINDOW = 5
"""A sliding window that is shorter than every sequence of the tests."""

TINY: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Grouped heads, and no two equal sizes that could be confused."""
