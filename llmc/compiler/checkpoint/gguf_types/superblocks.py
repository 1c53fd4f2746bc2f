"""Types of 256 weights that share float16 numbers, in blocks of 16 or 32 that have a small whole number each.

    Q2_K   = (scale:4 minimum:4)*16 codes:2*256 d:f16 dmin:f16
    Q3_K   = inverted_high:1*256 codes:2*256 scales:6*16 d:f16
    Q4_K   = d:f16 dmin:f16 (scale:6 minimum:6)*8 codes:4*256
    Q5_K   = d:f16 dmin:f16 (scale:6 minimum:6)*8 high:1*256 codes:4*256
    Q6_K   = codes:4*256 high:2*256 (scale:i8)*16 d:f16
    IQ4_XS = d:f16 high_scales:2*8 scales:4*8 codes:4*256

A block's scale is d times its number, in float32, and its minimum −dmin times the other: products of 11 and of at most
8 bits, which float32 holds exactly. Source: ggml's quants and gguf-py's.
"""

from __future__ import annotations

import numpy as np

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import FloatArray
from llmc.compiler.checkpoint.gguf_types.base import BlockType, Bytes, Parts, halves, planes
from llmc.compiler.checkpoint.gguf_types.blocks import FIVE_ZERO, IQ4_CODES

_STORED = 256
_TWO_ZERO = 8 - 2
"""What codes of 2 bits are moved by."""


def _q2_k(blocks: Bytes) -> Parts:
    numbers = blocks[..., :16]
    scale = halves(blocks, 80) * (numbers & np.uint8(15))
    return planes(blocks[..., 16:80], 32, 2) + _TWO_ZERO, scale, -(halves(blocks, 82) * (numbers >> np.uint8(4)))


def _q3_k(blocks: Bytes) -> Parts:
    codes = planes(blocks[..., 32:96], 32, 2) | planes(blocks[..., :32], 32, 1) << np.uint8(2)
    numbers = planes(blocks[..., 96:104], 8, 4) | planes(blocks[..., 104:108], 4, 2) << np.uint8(4)
    return codes + (8 - 4), halves(blocks, 108) * _less_32(numbers), None


def _q4_k(blocks: Bytes) -> Parts:
    return planes(blocks[..., 16:], 32, 4), *_scales_and_minimums(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    codes = planes(blocks[..., 48:], 32, 4) | planes(blocks[..., 16:48], 32, 1) << np.uint8(4)
    return codes + FIVE_ZERO, *_scales_and_minimums(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    codes = planes(blocks[..., :128], 64, 4) | planes(blocks[..., 128:192], 32, 2) << np.uint8(4)
    return codes + (128 - 32), halves(blocks, 208) * blocks[..., 192:208].view(np.int8), None


def _iq4_xs(blocks: Bytes) -> Parts:
    numbers = planes(blocks[..., 4:8], 1, 4) | planes(blocks[..., 2:4], 1, 2) << np.uint8(4)
    return IQ4_CODES[planes(blocks[..., 8:], 16, 4)], halves(blocks, 0) * _less_32(numbers), None


def _scales_and_minimums(blocks: Bytes) -> tuple[FloatArray, FloatArray]:
    """Of Q4_K and Q5_K: 4 bytes of scales, 4 of minimums, and 4 of the low bits of both of the last 4 blocks, whose
    high bits are those of the first 8 bytes."""
    scales, minimums, low = (blocks[..., at : at + 4] for at in (4, 8, 12))
    first, high = np.uint8(63), np.uint8(48)
    scale = np.concatenate([scales & first, low & np.uint8(15) | scales >> np.uint8(2) & high], axis=-1)
    minimum = np.concatenate([minimums & first, low >> np.uint8(4) | minimums >> np.uint8(2) & high], axis=-1)
    return halves(blocks, 0) * scale, -(halves(blocks, 2) * minimum)


def _less_32(numbers: Bytes) -> FloatArray:
    return numbers.astype(np.float32) - np.float32(32)


TYPES = {
    "Q2_K": BlockType(BlockForm("Q2_K", 4, 16, "minimums", "float32", stored_bits=2), _STORED, _TWO_ZERO, _q2_k),
    "Q3_K": BlockType(BlockForm("Q3_K", 4, 16, "", "float32", stored_bits=3), _STORED, 8, _q3_k),
    "Q4_K": BlockType(BlockForm("Q4_K", 4, 32, "minimums", "float32"), _STORED, 0, _q4_k),
    "Q5_K": BlockType(BlockForm("Q5_K", 8, 32, "minimums", "float32", stored_bits=5), _STORED, FIVE_ZERO, _q5_k),
    "Q6_K": BlockType(BlockForm("Q6_K", 8, 16, "", "float32", stored_bits=6), _STORED, 128, _q6_k),
    "IQ4_XS": BlockType(BlockForm("IQ4_XS", 8, 32, "", "float32", stored_bits=4, table="iq4"), _STORED, 128, _iq4_xs),
}
