"""The CPUs that the kernels run on, and the shapes that they take (source/attention.c, source/experts.c)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from llmc.artifacts.bundle.kernel_sets import KernelSet, best_set
from llmc.compiler.targets.unfit import unfit_for_kernels

_LANES, _MOST_DIM = 16, 512
KEYS = 64
"""A ring's places are a multiple of these: blocks of keys lie whole in it (source/tiles.h)."""


def set_for(features: Collection[str]) -> KernelSet | None:
    """The kernels that a host with these features (runtime/host.py) runs; None where it runs none."""
    return best_set(features) if sys.platform == "linux" else None


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
