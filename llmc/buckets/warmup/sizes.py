"""Bytes as the guide's logs print them."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(count: float) -> str:
    """`count` bytes with four digits: "504 MiB", "7.923 GiB"; negative where memory was released."""
    unit = 0
    while abs(count) >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.4g} {UNITS[unit]}"
