"""Keys and values in bfloat16, as llmc's attention keeps them (kernels/source/cache_lines.h): in the 16 bits of each,
with zero for what is below 2⁻¹²⁶, and no infinities, which attention could silently ignore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.bfloat16 import from_bfloat16, to_bfloat16
from llmc.runtime.executors.slot_tensors import Tensors

if TYPE_CHECKING:
    from llmc.runtime.executors.slot_tensors import TensorPart

_SIGN, _INFINITE, _NO_NUMBER = 0x8000, 0x7F80, 0x7FC0


def rounded(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of each number in the cache."""
    bits = to_bfloat16(numbers)
    size = bits & ~np.uint16(_SIGN)
    bits[size < 0x80] &= _SIGN
    bits[size >= _INFINITE] = _NO_NUMBER
    return bits


class RoundedTensors(Tensors):
    """Tensors of such bits."""

    def numbers(self, held: NDArray[Any]) -> NDArray[np.float32]:
        """Of bits."""
        return from_bfloat16(held)

    def held(self, numbers: NDArray[np.float32]) -> NDArray[Any]:
        """As bits."""
        return rounded(numbers)

    def filling(self, part: TensorPart, value: float) -> NDArray[Any]:
        """The bits of one."""
        return rounded(np.full(1, value, np.float32))
