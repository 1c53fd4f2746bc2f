"""GGUF's block types by name: how to decode the bytes of a matrix to quantized weights, scales and minimums.

Bytes of a matrix are uint8 [N, B, S]: N rows of B blocks of S bytes, as ggml lays them out. Decoded parts are [N, B,
...], weights in order. Source: ggml's quants and gguf-py's.

Types with blocks of 32 weights and float16 scales:

    Q8_0   = scale (q:i8)*32
    Q4_0   = scale low          Q4_1 = scale minimum low
    Q5_0   = scale high low     Q5_1 = scale minimum high low
    IQ4_NL = scale low          low = (lo:4 hi:4)*16   high = (bit:1)*32

The low half-bytes are weights 0–15 of the block, the high ones 16–31. 5-bit weights and IQ4_NL's values are held in 8
bits.

Types with 256 weights that share float16 numbers, in blocks of 16 or 32 with a small whole number each:

    Q2_K   = (scale:4 minimum:4)*16 codes:2*256 d:f16 dmin:f16
    Q3_K   = inverted_high:1*256 codes:2*256 scales:6*16 d:f16
    Q4_K   = d:f16 dmin:f16 (scale:6 minimum:6)*8 codes:4*256
    Q5_K   = d:f16 dmin:f16 (scale:6 minimum:6)*8 high:1*256 codes:4*256
    Q6_K   = codes:4*256 high:2*256 (scale:i8)*16 d:f16
    IQ4_XS = d:f16 high_scales:2*8 scales:4*8 codes:4*256

A block's scale is d times its number in float32, its minimum −dmin times its other number. Factors have 11 and at most
8 bits, so float32 holds the results exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import FloatArray

BLOCK = 32
_SIGN = np.uint8(128)
FIVE_ZERO = 128 - 16
"""Added to 5-bit weights."""
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
IQ4_VALUES = _IQ4_VALUES.view(np.uint8) ^ _SIGN
"""The values of IQ4_NL's and IQ4_XS's 16 codes before their scale, with zero point 128."""
_STORED = 256
_TWO_ZERO = 8 - 2
"""Added to 2-bit weights."""
Bytes = npt.NDArray[np.uint8]
Parts: TypeAlias = "tuple[Bytes, FloatArray, FloatArray | None]"
"""Quantized weights, one per byte; the scale of each `form.block` of them; their minimums, or None without minimums."""


@dataclass(frozen=True)
class BlockType:
    """`stored` weights lie together; `zero` is the zero point of all; `split` decodes the bytes of a matrix.

    Weights of fewer bits than `form.bits` are shifted to the middle of the wider range. Matmuls that quantize
    activations and add minimums separately are then as exact as the weights are small around that middle.
    """

    form: BlockForm
    stored: int
    zero: int
    split: Callable[[Bytes], Parts]


def planes(packed: Bytes, run: int, bits: int) -> Bytes:
    """Unpack numbers of `bits` bits, 8 / bits per byte: [N, B, S] → [N, B, S * 8 / bits]. `run` bytes hold the lowest
    bits of their first `run` numbers, the next bits hold the following `run` numbers."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    numbers = (packed.reshape(*packed.shape[:2], -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(*packed.shape[:2], -1)


def halves(blocks: Bytes, at: int) -> FloatArray:
    """The float16 at byte `at` of every block, as float32 [N, B, 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[..., 2:] ^ _SIGN, halves(blocks, 0), None


def _q4_0(blocks: Bytes) -> Parts:
    return planes(blocks[..., 2:], 16, 4), halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return planes(blocks[..., 4:], 16, 4), halves(blocks, 0), halves(blocks, 2)


def _five(blocks: Bytes, at: int) -> Bytes:
    return (planes(blocks[..., at + 4 :], 16, 4) | planes(blocks[..., at : at + 4], 1, 1) << np.uint8(4)) + FIVE_ZERO


def _q5_0(blocks: Bytes) -> Parts:
    return _five(blocks, 2), halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    return _five(blocks, 4), halves(blocks, 0), halves(blocks, 2)


def _iq4_nl(blocks: Bytes) -> Parts:
    return IQ4_VALUES[planes(blocks[..., 2:], 16, 4)], halves(blocks, 0), None


def _q2_k(blocks: Bytes) -> Parts:
    numbers = blocks[..., :16]
    scale = halves(blocks, 80) * (numbers & np.uint8(15))
    return planes(blocks[..., 16:80], 32, 2) + _TWO_ZERO, scale, -(halves(blocks, 82) * (numbers >> np.uint8(4)))


def _q3_k(blocks: Bytes) -> Parts:
    quantized = planes(blocks[..., 32:96], 32, 2) | planes(blocks[..., :32], 32, 1) << np.uint8(2)
    numbers = planes(blocks[..., 96:104], 8, 4) | planes(blocks[..., 104:108], 4, 2) << np.uint8(4)
    return quantized + (8 - 4), halves(blocks, 108) * _less_32(numbers), None


def _q4_k(blocks: Bytes) -> Parts:
    return planes(blocks[..., 16:], 32, 4), *_scales_and_minimums(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    quantized = planes(blocks[..., 48:], 32, 4) | planes(blocks[..., 16:48], 32, 1) << np.uint8(4)
    return quantized + FIVE_ZERO, *_scales_and_minimums(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    quantized = planes(blocks[..., :128], 64, 4) | planes(blocks[..., 128:192], 32, 2) << np.uint8(4)
    return quantized + (128 - 32), halves(blocks, 208) * blocks[..., 192:208].view(np.int8), None


def _iq4_xs(blocks: Bytes) -> Parts:
    numbers = planes(blocks[..., 4:8], 1, 4) | planes(blocks[..., 2:4], 1, 2) << np.uint8(4)
    return IQ4_VALUES[planes(blocks[..., 8:], 16, 4)], halves(blocks, 0) * _less_32(numbers), None


def _scales_and_minimums(blocks: Bytes) -> tuple[FloatArray, FloatArray]:
    """For Q4_K and Q5_K: 4 bytes of scales, 4 of minimums, and 4 with the low bits of both for the last 4 blocks, whose
    high bits are those of the first 8 bytes."""
    scales, minimums, low = (blocks[..., at : at + 4] for at in (4, 8, 12))
    first, high = np.uint8(63), np.uint8(48)
    scale = np.concatenate([scales & first, low & np.uint8(15) | scales >> np.uint8(2) & high], axis=-1)
    minimum = np.concatenate([minimums & first, low >> np.uint8(4) | minimums >> np.uint8(2) & high], axis=-1)
    return halves(blocks, 0) * scale, -(halves(blocks, 2) * minimum)


def _less_32(numbers: Bytes) -> FloatArray:
    return numbers.astype(np.float32) - np.float32(32)


BLOCK_TYPES = {
    "Q8_0": BlockType(BlockForm("Q8_0", 8, BLOCK, ""), BLOCK, 128, _q8_0),
    "Q4_0": BlockType(BlockForm("Q4_0", 4, BLOCK, ""), BLOCK, 8, _q4_0),
    "Q4_1": BlockType(BlockForm("Q4_1", 4, BLOCK, "minimums"), BLOCK, 0, _q4_1),
    "Q5_0": BlockType(BlockForm("Q5_0", 8, BLOCK, "", stored_bits=5), BLOCK, 128, _q5_0),
    "Q5_1": BlockType(BlockForm("Q5_1", 8, BLOCK, "minimums", stored_bits=5), BLOCK, FIVE_ZERO, _q5_1),
    "IQ4_NL": BlockType(BlockForm("IQ4_NL", 8, BLOCK, "", stored_bits=4, table="iq4"), BLOCK, 128, _iq4_nl),
    "Q2_K": BlockType(BlockForm("Q2_K", 4, 16, "minimums", "float32", stored_bits=2), _STORED, _TWO_ZERO, _q2_k),
    "Q3_K": BlockType(BlockForm("Q3_K", 4, 16, "", "float32", stored_bits=3), _STORED, 8, _q3_k),
    "Q4_K": BlockType(BlockForm("Q4_K", 4, 32, "minimums", "float32"), _STORED, 0, _q4_k),
    "Q5_K": BlockType(BlockForm("Q5_K", 8, 32, "minimums", "float32", stored_bits=5), _STORED, FIVE_ZERO, _q5_k),
    "Q6_K": BlockType(BlockForm("Q6_K", 8, 16, "", "float32", stored_bits=6), _STORED, 128, _q6_k),
    "IQ4_XS": BlockType(BlockForm("IQ4_XS", 8, 32, "", "float32", stored_bits=4, table="iq4"), _STORED, 128, _iq4_xs),
}
