"""The shapes that the kernels take (source/attention.c, source/experts.c)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.options import UnfitError

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


def unfit_for_kernels(why: str) -> UnfitError:
    """The error that says why ONNX Runtime's own kernels have to do instead of llmc's."""
    advice = "use --kernels onnxruntime, without --kv-cache-dtype and --prompt-dtype"
    return UnfitError(why, advice, kernels="onnxruntime", kv_cache_dtype=None, prompt_dtype=None)
