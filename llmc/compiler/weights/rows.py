"""Matrices in 8 bits with a scale for each row (an output channel): w ≈ q · scale, both symmetric.

int8   scale = largest magnitude / 127; q is rounded to nearest, ties to even
fp8    scale = largest magnitude / 448; q is the nearest float8 e4m3 (no infinities), ties to even; 448 is the
       largest number of that format (OCP 8-bit Floating Point Specification, revision 1.0)

A row of zeros has scale 1. Rows are independent, so tensors are quantized one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
LARGEST = {"int8": 127, "fp8": 448}
"""The largest quantized value of each format."""


def scales(weight: Floats, name: str) -> Floats:
    """The scale of each row: [.., K] → [..]."""
    found: Floats = np.abs(weight).max(-1) / np.float32(LARGEST[name])
    found[found < np.finfo(np.float32).tiny] = 1
    return found


def quantized(weight: Floats, scale: Floats, name: str) -> NDArray[np.int8]:
    """Quantize rows with these scales: [.., K] → [.., K]; fp8 as its bits."""
    largest = LARGEST[name]
    held = np.clip(weight / scale[..., None], -largest, largest)
    if name == "int8":
        found: NDArray[np.int8] = np.rint(held).astype(np.int8)
        return found
    from ml_dtypes import float8_e4m3fn

    bits: NDArray[np.int8] = held.astype(float8_e4m3fn).view(np.int8)
    return bits


def _quantized(name: str) -> Callable[[Floats], NDArray[np.int8]]:
    return lambda weight: quantized(weight, scales(weight, name), name)


def _scales(name: str) -> Callable[[Floats], Floats]:
    return lambda weight: scales(weight, name)


SCALES: Mapping[str, Callable[[Floats], Floats]] = {f"{name}_scales": _scales(name) for name in LARGEST}
"""Transforms of a tensor [N, K] to its scales, float32 [N]."""
QUANTIZERS: Mapping[str, Callable[[Floats], NDArray[np.int8]]] = {f"{name}_codes": _quantized(name) for name in LARGEST}
"""Transforms of a tensor [N, K] to its quantized weights, 8 bits [N, K]."""
