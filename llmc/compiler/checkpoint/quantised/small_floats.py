"""4-bit and 8-bit floats: tables of their values, and float8 e4m3 matrices with shared scales.

e4m3 and e8m0: OCP 8-bit Floating Point Specification 1.0 (e4m3 has no infinity; 0x7f and 0xff are NaN), and
Microscaling Formats specification 1.0, section 5.4.1; e2m1: section 5.3.3 of the latter. Every value is exact in
float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.checkpoint.base import FLOATS8, FloatArray, require_finite
from llmc.compiler.checkpoint.quantised.base import QuantisedTensor, StoredTensors

_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1: FloatArray = np.concatenate([_HALF, -_HALF])
"""Values of the 16 codes of e2m1."""
E2M1_VALUES: npt.NDArray[np.uint8] = (2 * E2M1 + 128).astype(np.uint8)
"""Twice each of these values as an integer, offset to the middle of 8 bits."""
E8M0_BIAS, E8M0_NO_NUMBER = 127, 255
FLOAT8 = "F8_E4M3"
SCALES = ("F32", "BF16", "F16", "U8", "F8_E8M0")
"""Types in which scales of float8 matrices are stored; the last two hold powers of two (e8m0)."""


def _e4m3() -> FloatArray:
    quantized = np.arange(128)
    exponent, mantissa = quantized >> 3, quantized & 7
    values = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3: FloatArray = _e4m3()
"""Values of the 256 codes of e4m3."""


def scales_as_floats(stored: StoredTensors, name: str) -> FloatArray:
    """Scales of one of SCALES as float32. Raises CheckpointError for NaN."""
    if stored.dtype(name) not in ("U8", "F8_E8M0"):
        return stored.floats(name)
    exponents = stored.quantized(name)
    if exponents.size and exponents.max() == E8M0_NO_NUMBER:
        raise stored.error(f"{name} holds a scale of {E8M0_NO_NUMBER}, which is NaN: fetch the checkpoint again")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - E8M0_BIAS)


class Float8Tensor(QuantisedTensor):
    """Float8 matrices […, N, K]; each tile of `tile` = (rows, inputs) shares a scale, or all values do (None).

    `scale` names the tensor of scales, [.., N / rows, K / inputs] rounded up; a single scale may have any shape. Values
    are computed in float32.
    """

    def __init__(
        self, stored: StoredTensors, name: str, scale: str, tile: tuple[int, int] | None, more: tuple[str, ...] = ()
    ) -> None:
        self._stored, self._name, self._scale = stored, name, scale
        self.parts = (name, scale, *more)
        stored.require(name, name, (FLOAT8,))
        self.shape = stored.shape(name)
        if len(self.shape) < 2:
            raise stored.error(f"tensor {name} is {list(self.shape)} in float8, but not a matrix")
        *others, rows, width = self.shape
        self._tile = (max(rows, 1), max(width, 1)) if tile is None else tile
        self._grid = (*others, -(-rows // self._tile[0]), -(-width // self._tile[1]))
        if scale in stored and math.prod(stored.shape(scale)) == math.prod(self._grid) == 1:
            stored.require(name, scale, SCALES)
        elif tile is not None and tile[1] >= width:
            stored.require(name, scale, SCALES, self._grid, self._grid[:-1])
        else:
            stored.require(name, scale, SCALES, self._grid)

    def values(self) -> FloatArray:
        """Dequantized, one row of tiles at a time."""
        built: FloatArray = E4M3[self._stored.quantized(self._name)]
        scales = scales_as_floats(self._stored, self._scale).reshape(-1, *self._grid[-2:])
        rows, width = self._tile
        with np.errstate(over="ignore"):
            for matrix, grid in zip(built.reshape(-1, *self.shape[-2:]), scales, strict=True):
                for at, line in enumerate(grid):
                    matrix[at * rows : (at + 1) * rows] *= np.repeat(line, width)[: matrix.shape[1]]
        return require_finite(built, self._name, self._stored.path)

    def unkept(self) -> str | None:
        """Kernels multiply integers only."""
        return FLOATS8


def low_and_high(quantized: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Unpack two 4-bit codes per byte, the low half first: [.., n] → [.., 2n]."""
    return np.stack([quantized & np.uint8(15), quantized >> np.uint8(4)], -1).reshape(*quantized.shape[:-1], -1)


def stated_tile(size: Any, name: str, stored: StoredTensors) -> tuple[int, int]:
    """Rows and inputs that share a scale, from field `name` of quantization_config. Raises CheckpointError."""
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise stored.error(f"quantization_config: {name} is {size!r:.60}, not two sizes: fetch the checkpoint again")
    return size[0], size[1]
