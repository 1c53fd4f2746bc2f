"""Types of blocks of 32 weights, each with float16 numbers of its own.

    Q8_0   = scale (q:i8)*32
    Q4_0   = scale low          Q4_1 = scale minimum low
    Q5_0   = scale high low     Q5_1 = scale minimum high low
    IQ4_NL = scale low          low = (lo:4 hi:4)*16   high = (bit:1)*32

The low half-bytes are weights 0–15 of the block and the high ones 16–31. Codes of 5 bits, and IQ4_NL's values, are held
in 8 bits. Source: ggml's quants and gguf-py's.
"""

from __future__ import annotations

import numpy as np

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.gguf_types.base import BlockType, Bytes, Parts, halves, planes

BLOCK = 32
_SIGN = np.uint8(128)
FIVE_ZERO = 128 - 16
"""What codes of 5 bits are moved by."""
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
IQ4_CODES = _IQ4_VALUES.view(np.uint8) ^ _SIGN
"""What the codes of IQ4_NL and IQ4_XS stand for before their scale, with the zero point 128."""


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
    return IQ4_CODES[planes(blocks[..., 2:], 16, 4)], halves(blocks, 0), None


TYPES = {
    "Q8_0": BlockType(BlockForm("Q8_0", 8, BLOCK, ""), BLOCK, 128, _q8_0),
    "Q4_0": BlockType(BlockForm("Q4_0", 4, BLOCK, ""), BLOCK, 8, _q4_0),
    "Q4_1": BlockType(BlockForm("Q4_1", 4, BLOCK, "minimums"), BLOCK, 0, _q4_1),
    "Q5_0": BlockType(BlockForm("Q5_0", 8, BLOCK, "", stored_bits=5), BLOCK, 128, _q5_0),
    "Q5_1": BlockType(BlockForm("Q5_1", 8, BLOCK, "minimums", stored_bits=5), BLOCK, FIVE_ZERO, _q5_1),
    "IQ4_NL": BlockType(BlockForm("IQ4_NL", 8, BLOCK, "", stored_bits=4, table="iq4"), BLOCK, 128, _iq4_nl),
}
