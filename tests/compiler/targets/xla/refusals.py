"""XLA's messages that a program exceeds a TPU's memory, read."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_AMOUNT = r"([\d.]+)([BKMGT]?)"
_TOO_LARGE = re.compile(rf"total memory required for HLO temporaries \({_AMOUNT}\) exceeds available HBM \({_AMOUNT}\)")
_EXCEEDED = re.compile(rf"Used {_AMOUNT} of {_AMOUNT} hbm\. Exceeded hbm capacity by {_AMOUNT}\.")


def out_of_memory(text: str) -> tuple[int, int] | None:
    """(used, available) bytes of XLA's message that a program exceeds a TPU's memory; None for any other text.

    XLA rounds what it prints, to two decimals; `used` is above `available` all the same.
    """
    if match := _EXCEEDED.search(text):
        available = _bytes(match[3], match[4])
        return available + max(1, _bytes(match[5], match[6])), available
    if match := _TOO_LARGE.search(text):
        available = _bytes(match[3], match[4])
        return max(_bytes(match[1], match[2]), available + 1), available
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
