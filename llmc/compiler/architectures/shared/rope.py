"""How far a configuration's rotary positions reach.

Frequencies of the types `dynamic` and `longrope` depend on how long a sequence has become (transformers 5.23,
modeling_rope_utils.py, `dynamic_rope_update`): past a length they change, for tokens whose rotated keys are in the
cache already too. A graph has the frequencies below that length, and sequences end there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BY_LENGTH = ("dynamic", "longrope")
"""Types whose frequencies change with the length of the sequence."""

_STRETCHED = ("linear", "yarn")
"""Types whose factor stretches the original length, or max_position_embeddings where that is not stated."""


def positions(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Positions that a sequence has by default, and at most; None where config.json does not say."""
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
