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
    if bits == 8:
        return data[:, :count]
    if 8 % bits == 0:
        codes = np.empty((*data.shape, 8 // bits), np.uint8)
        for at in range(8 // bits):  # several times as fast as all shifts at once
            np.right_shift(data, np.uint8(at * bits), out=codes[..., at])
        codes &= np.uint8((1 << bits) - 1)
        return codes.reshape(len(data), -1)[:, :count]
    flags = np.unpackbits(data, axis=-1, count=count * bits, bitorder="little").reshape(len(data), count, bits)
    return np.packbits(flags, axis=-1, bitorder="little")[..., 0]
