"""Bytes of arrays in a TPU's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

_LANES, _ROWS = 128, 8
_LINE = 1024


def device_bytes(shape: Sequence[int], item_bytes: int) -> int:
    """Bytes of an array on a TPU, the padding of its layout included.

    XLA lays two axes out in tiles of 8 × 128, those two that waste least, one axis alone in lines of 1024, and smaller
    ones where there is less (measured with libtpu 0.0.42; for the notation see "Tiled layout" in XLA's documentation).
    """
    if len(shape) < 2:
        length, line = math.prod(shape), _LANES * 4 // item_bytes
        while line < min(length, _LINE):
            line *= 2
        return _up(length, line) * item_bytes
    pairs = permutations(range(len(shape)), 2)
    return min(_tiled(shape, *pair, item_bytes) for pair in pairs)


def _tiled(shape: Sequence[int], row: int, column: int, item_bytes: int) -> int:
    tile = max(4 // item_bytes, 1)
    while tile < min(shape[row], _ROWS):
        tile *= 2
    others = math.prod(n for axis, n in enumerate(shape) if axis not in (row, column))
    return others * _up(shape[row], tile) * _up(shape[column], _LANES) * item_bytes


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
