"""Quantities as people type them: 10%, 30m, 30d, 8GiB."""

from __future__ import annotations

import math
import re

from llmc.errors import InputError

_SECONDS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {
    "": 1, "b": 1, "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4,
    "tb": 1000**4, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z%]*)\s*", re.IGNORECASE)


def fraction(flag: str, text: str | None) -> float | None:
    """ "10%" or "0.1" as 0.1; None stays None. Raises InputError, naming `flag`."""
    return _quantity(flag, text, {"": 1.0, "%": 0.01}, "a fraction such as 0.1 or 10%")


def duration(flag: str, text: str | None) -> float | None:
    """Seconds of "90", "90s", "30m", "1.5h" or "30d"; None stays None. Raises InputError, naming `flag`."""
    return _quantity(flag, text, _SECONDS, "a time such as 90s, 30m, 1.5h or 30d")


def size(flag: str, text: str | None) -> int | None:
    """Bytes of "512MiB", "8GiB" or "2e9"; None stays None. Raises InputError, naming `flag`."""
    found = _quantity(flag, text, _BYTES, "a size such as 512MiB or 8GB")
    return None if found is None else int(found)


def rate(flag: str, text: str | None) -> float | None:
    """Requests per second, or "inf" for all at once; None stays None. Raises InputError, naming `flag`."""
    if text is not None and text.strip().lower() in ("inf", "infinity"):
        return math.inf
    found = _quantity(flag, text, {"": 1.0}, "a number of requests per second above 0, or inf")
    if found == 0:
        raise InputError(f"{flag} {text!r} is not a number of requests per second above 0, or inf")
    return found


def _quantity(flag: str, text: str | None, units: dict[str, float] | dict[str, int], expected: str) -> float | None:
    if text is None:
        return None
    found = _NUMBER.fullmatch(text)
    if found is None or found[2].lower() not in units:
        raise InputError(f"{flag} {text!r} is not {expected}")
    return float(found[1]) * units[found[2].lower()]
