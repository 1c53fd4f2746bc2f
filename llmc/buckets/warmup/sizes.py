"""Bytes, for people, in the form that the guide's logs have; and as a device states them."""

from __future__ import annotations

from llmc.errors import DeviceError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(count: float) -> str:
    """`count` bytes with four digits: "504 MiB", "7.923 GiB"; negative where memory was released."""
    unit = 0
    while abs(count) >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.4g} {UNITS[unit]}"


def checked(count: object) -> int:
    """What a device states as a number of bytes; raises DeviceError for anything that is none."""
    if type(count) is not int or count < 0:
        raise DeviceError(
            f"the device states {count!r} as bytes of its memory, so no budget for graphs can be kept; run without "
            "graphs (--graph-reserved-mem 0), or mend its driver"
        )
    return count
