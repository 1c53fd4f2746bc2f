"""How many positions a configuration's RoPE covers.

Frequencies of the types `dynamic` and `longrope` depend on the current sequence length (transformers 5.23,
modeling_rope_utils.py, `dynamic_rope_update`): past a limit they change, even for tokens whose rotated keys are in the
cache. A graph uses the frequencies below that limit, and sequences end there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BY_LENGTH = ("dynamic", "longrope")
"""Types with frequencies that depend on the sequence length."""

_STRETCHED = ("linear", "yarn")
"""Types whose factor scales the original length, or max_position_embeddings if that is not stated."""


def positions(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Default and largest number of positions of a sequence; None if config.json does not state them."""
    most = config.get("max_position_embeddings")
    if type(most) is not int or most < 1:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    original = original if type(original) is int and original > 0 else most
    if kind == "longrope":
        most = min(most, original)
    if kind in _STRETCHED and isinstance(factor, int | float):
        return most, max(most, int(original * factor))
    return most, most
