"""4-bit and 8-bit floats: tables of their values, float8 e4m3 matrices with shared scales (fp8), and mxfp4 experts.

e4m3 and e8m0: OCP 8-bit Floating Point Specification 1.0 (e4m3 has no infinity; 0x7f and 0xff are NaN), and
Microscaling Formats specification 1.0, section 5.4.1; e2m1: section 5.3.3 of the latter. Every value is exact in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import FLOATS8, FloatArray, QuantisedBlocks, require_finite
from llmc.compiler.checkpoint.quantised import ACTIVATIONS, QuantisedTensor, Reading, StoredTensors
from llmc.errors import CheckpointError

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
    """Float8 matrices […, N, K]; each tile of `tile` = (rows, inputs) shares a scale, or all values do (None). `scale`
    names the tensor of scales, [.., N / rows, K / inputs] rounded up; a single scale may have any shape."""

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
        built: FloatArray = E4M3[self._stored.quantized(self._name)]
        scales = scales_as_floats(self._stored, self._scale).reshape(-1, *self._grid[-2:])
        rows, width = self._tile
        with np.errstate(over="ignore"):
            for matrix, grid in zip(built.reshape(-1, *self.shape[-2:]), scales, strict=True):
                for at, line in enumerate(grid):
                    matrix[at * rows : (at + 1) * rows] *= np.repeat(line, width)[: matrix.shape[1]]
        return require_finite(built, self._name, self._stored.path)

    def unkept(self) -> str | None:
        return FLOATS8


def low_and_high(quantized: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Unpack two 4-bit codes per byte, the low half first: [.., n] → [.., 2n]."""
    return np.stack([quantized & np.uint8(15), quantized >> np.uint8(4)], -1).reshape(*quantized.shape[:-1], -1)


def stated_tile(size: Any, name: str, stored: StoredTensors) -> tuple[int, int]:
    """Rows and inputs that share a scale, from field `name` of quantization_config. Raises CheckpointError."""
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise stored.error(f"quantization_config: {name} is {size!r:.60}, not two sizes: fetch the checkpoint again")
    return size[0], size[1]


_SCALE_ENDS = ("_scale_inv", "_scale")
_LEFT_OUT = ("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale")


def read_fp8(stated: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's fp8 tensors: float8 e4m3 matrices in which tiles (mostly 128 × 128) or all values share a scale.

    A matrix W [.., N, K] of type F8_E4M3 has its scales in W_scale_inv or W_scale. With a `weight_block_size` of [rows,
    inputs] they are [N / rows, K / inputs], rounded up; without, a single number. They are float32 or powers of two
    (`ue8m0`). Settings of activations (`activation_scheme`, their scales) change no weight and are ignored.

    Sources: transformers 5.23, integrations/finegrained_fp8.py (Fp8Dequantize) and utils/quantization_config.py
    (FineGrainedFP8Config); DeepSeek-V3's README_WEIGHTS.md ("FP8 weight documentation").
    """
    size = stated.get("weight_block_size")
    tile = None if size is None else stated_tile(size, "weight_block_size", stored)
    names = [name for name in stored.names() if stored.dtype(name) == FLOAT8]
    if not names:
        raise stored.error(f"quantization_config says fp8, but no tensor is of type {FLOAT8}: fetch it again")
    tensors = {}
    for name in names:
        scale = next((name + end for end in _SCALE_ENDS if name + end in stored), name + _SCALE_ENDS[0])
        tensors[name] = Float8Tensor(stored, name, scale, tile)
    left_out = frozenset(name for name in stored.names() if name.endswith(_LEFT_OUT))
    return Reading(tensors, left_out, (ACTIVATIONS,) if left_out or stated.get("activation_scheme") else ())


_BLOCKS, _EXPONENTS = "_blocks", "_scales"
_BYTES = 16
MXFP4_FORM = BlockForm("mxfp4", 8, 2 * _BYTES, "", "bfloat16", stored_bits=4, table="float4", turned=True)


def read_mxfp4(stated: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's mxfp4 tensors: experts. A folder without such tensors is read as unquantized.

    A tensor NAME [E, K, N] is stored as NAME_blocks [E, N, K/32, 16] and NAME_scales [E, N, K/32], both bytes. A byte
    of a block holds two 4-bit values (E2M1), the first in its low half; a scale s multiplies its 32 values by
    2 ** (s - 127) (E8M0; 255 is NaN). Twice a 4-bit value is an integer, and blocks hold these integers for the
    transposed matrices. Sources: OCP Microscaling Formats specification 1.0, sections 5.3.3 and 5.4.1; transformers
    5.23, integrations/mxfp4.py (names and dimension order).
    """
    names = [name.removesuffix(_BLOCKS) for name in stored.names(_BLOCKS)]
    return Reading({name: _Experts(stored, name) for name in names})


class _Experts(QuantisedTensor):
    def __init__(self, stored: StoredTensors, name: str) -> None:
        self._stored, self._name = stored, name
        self.parts = (name + _BLOCKS, name + _EXPONENTS)
        for part in self.parts:
            stored.require(name + _BLOCKS, part, ("U8",))
        blocks, scales = (stored.shape(part) for part in self.parts)
        if len(blocks) != 4 or blocks[3] != _BYTES or blocks[:3] != scales:
            raise stored.error(
                f"{name}{_BLOCKS} is {list(blocks)} and {name}{_EXPONENTS} {list(scales)}, not [E, N, G, {_BYTES}] and "
                "[E, N, G] as MXFP4 is stored: fetch the checkpoint again"
            )
        experts, rows, groups, _ = blocks
        self.shape = (experts, groups * 2 * _BYTES, rows)

    def values(self) -> FloatArray:
        built: FloatArray = np.empty(self.shape, np.float32)
        for matrix, blocks in zip(built, self.reordered_blocks().apart(), strict=True):
            matrix[...] = blocks.dequantise().T
        return built

    def unkept(self) -> str | None:
        return "mxfp4"

    def reordered_form(self) -> BlockForm:
        return MXFP4_FORM

    def reordered_blocks(self) -> QuantisedBlocks:
        """[E · N, K], with half of each scale."""
        quantized, exponents = (self._stored.quantized(part) for part in self.parts)
        experts, _, rows = self.shape
        scales = exponents.reshape(experts * rows, -1)
        return mxfp4_blocks(low_and_high(quantized), scales, experts, self._name, self._stored.path)


def mxfp4_blocks(
    quantized: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8], experts: int, name: str, path: Path
) -> QuantisedBlocks:
    """Blocks of 4-bit values [rows, …] and scales [rows, K/32], rows of all experts one after another. Raises
    CheckpointError, naming the tensor and its file, for a value that is not finite."""
    if exponents.size and exponents.max() == E8M0_NO_NUMBER:
        raise CheckpointError(f"{path}: {name} holds a scale of {E8M0_NO_NUMBER}, which is NaN: fetch it again")
    scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - (E8M0_BIAS + 1))
    q = E2M1_VALUES[quantized].reshape(*scale.shape, MXFP4_FORM.block)
    with np.errstate(over="ignore"):
        extremes = np.stack([q.min(-1), q.max(-1)]).astype(np.float32) - 128
        extremes *= scale
    require_finite(extremes, name, path)
    return QuantisedBlocks(MXFP4_FORM.type, MXFP4_FORM.bits, 128, q, scale, None, experts)


READERS = {"fp8": read_fp8, "mxfp4": read_mxfp4}
