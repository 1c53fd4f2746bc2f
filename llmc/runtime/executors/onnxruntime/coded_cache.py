"""Keys and values in 8 bits, as llmc's attention keeps them (kernels/source/cache_lines.h).

A line holds a head's key or value of one token: its codes, int8 [width], and their scale, the first half of a float32
(bfloat16). The largest code is 127, so lines that are read and written again stay what they were, to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache_shape import SCALE_BYTES
from llmc.runtime.executors.slot_tensors import Tensors

if TYPE_CHECKING:
    from llmc.runtime.executors.slot_tensors import TensorPart

_LARGEST, _LEAST = np.float32(127), np.float32(1e-30)
_NO_NUMBER = 0x7FC00000


def encoded(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Lines [.., width + SCALE_BYTES] of [.., width]; one with a number that is not finite reads as no numbers."""
    finite = np.isfinite(numbers).all(-1, keepdims=True)
    numbers = np.where(finite, numbers, 0).astype(np.float32)
    bits = (np.abs(numbers).max(-1, keepdims=True) / _LARGEST).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    scales = bits.view(np.float32)
    kept = scales >= _LEAST
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=kept)
    bits = np.where(finite, np.where(kept, bits, 0), _NO_NUMBER) >> 16
    codes = np.rint(numbers * inverse).astype(np.int8).view(np.uint8)
    return np.concatenate([codes, bits.astype("<u2").view(np.uint8)], -1)


def decoded(lines: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers [.., width] of lines."""
    codes = np.ascontiguousarray(lines[..., :-SCALE_BYTES]).view(np.int8)
    bits = np.ascontiguousarray(lines[..., -SCALE_BYTES:]).view("<u2").astype(np.uint32) << 16
    return codes.astype(np.float32) * bits.view(np.float32)


class CodedTensors(Tensors):
    """Tensors of lines."""

    def numbers(self, held: NDArray[Any]) -> NDArray[np.float32]:
        """Of lines."""
        return decoded(held)

    def held(self, numbers: NDArray[np.float32]) -> NDArray[Any]:
        """As lines."""
        return encoded(numbers)

    def filling(self, part: TensorPart, value: float) -> NDArray[Any]:
        """A line."""
        return encoded(np.full(part.like.shape[1] - SCALE_BYTES, value, np.float32))
