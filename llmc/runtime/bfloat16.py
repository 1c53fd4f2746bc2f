"""Conversion between float32 and bfloat16, which numpy lacks. A bfloat16 is the upper half of a float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_NAN = 0x7FC0


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round each value to the nearest bfloat16, ties to even, and return its 16 bits. NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded[np.isnan(values)] = _NAN
    return rounded.astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bfloat16 bits to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
