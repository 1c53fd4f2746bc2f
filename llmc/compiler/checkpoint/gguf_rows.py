"""The order of rows in q and k projections: llama.cpp's on one side, transformers' on the other.

llama.cpp rotates neighbours (2i, 2i+1) of a head, transformers rotates (i, i + head_dim/2), so conversion to GGUF
interleaves the two halves of each head where the family says so (`Gguf.interleaved`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

Scalar = TypeVar("Scalar", bound=np.generic)


def restore_row_order(rows: np.ndarray[Any, np.dtype[Scalar]], heads: int) -> np.ndarray[Any, np.dtype[Scalar]]:
    """Rows [N, …] of a q or k projection, from llama.cpp's order back to transformers'."""
    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows [N, …] of a q or k projection in llama.cpp's order: the two halves of each head in turn."""
    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)
