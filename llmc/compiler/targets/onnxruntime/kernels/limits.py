"""The shapes that the kernels take (source/attention.c, source/experts.c)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.targets.unfit import unfit_for_kernels

_LANES, _MOST_DIM = 16, 512
KEYS = 64
"""A ring's places are a multiple of these: blocks of keys lie whole in it (source/tiles.h)."""


def takes_experts(features: int) -> bool:
    """Whether the kernel takes experts of so many features (source/experts.c)."""
    return features % _LANES == 0


def require_heads(attrs: Mapping[str, Any]) -> None:
    """Raise UnfitError for a gqa node (program/fuse.py) that the kernel does not take."""
    widest = max(int(attrs["head_dim"]), int(attrs.get("value_dim", 0)))
    if widest > _MOST_DIM:
        raise unfit_for_kernels(
            f"attention of heads {widest} wide: llmc's kernels take heads of at most {_MOST_DIM} values"
        )
