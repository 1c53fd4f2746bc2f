"""Codes of a few bits, packed densely into 32-bit words: the first code in the lowest bits, some across two words."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

WORD = 32


def words_of(count: int, bits: int) -> int:
    """Words that so many codes take."""
    return -(-count * bits // WORD)


def unpack(words: npt.NDArray[Any], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` codes of each row: int32 or uint32 [R, W] → uint8 [R, count]."""
    data = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (data[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return codes.reshape(len(data), -1)[:, :count]
    flags = np.unpackbits(data, axis=-1, count=count * bits, bitorder="little").reshape(len(data), count, bits)
    return np.packbits(flags, axis=-1, bitorder="little")[..., 0]
