"""Validators for single values. Each takes a parameter's name and value and returns the normalized value.

All raise InputError naming the parameter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llmc.errors import InputError

Check = Callable[[str, Any], Any]


def integer(least: int, most: int | None = None) -> Check:
    """Accept any integer type within bounds."""

    def check(name: str, value: Any) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise InputError(f"{name} must be an integer, not {value!r:.80}") from None
        if number < least or (most is not None and number > most):
            raise InputError(
                f"{name} must be {f'at least {least}' if most is None else f'{least} to {most}'}, not {number}"
            )
        return number

    return check


def number(least: float, most: float = math.inf, open_below: bool = False) -> Check:
    """Accept a finite number within bounds; `open_below` excludes `least`."""

    def check(name: str, value: Any) -> float:
        try:
            if isinstance(value, bool | str):
                raise TypeError
            found = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{name} must be a number, not {value!r:.80}") from None
        if not (least <= found <= most) or math.isinf(found) or (open_below and found == least):
            above = "more than" if open_below else "at least"
            upper = "" if math.isinf(most) else f" and at most {most:g}"
            raise InputError(f"{name} must be {above} {least:g}{upper}, not {found}")
        return found

    return check


def boolean(name: str, value: Any) -> bool:
    """Accept True or False, but not 0 or 1."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {value!r:.80}")
    return value


def instance_of(kind: type) -> Check:
    """Accept an instance of that class."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise InputError(f"{name} must be a {kind.__name__}, not {value!r:.80}")
        return value

    return check


def optional(check: Check) -> Check:
    """Accept None or what `check` accepts."""
    return lambda name, value: None if value is None else check(name, value)


def listed(name: str, value: Any) -> Iterable[Any]:
    """Accept an iterable that is neither a text nor a mapping."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InputError(f"{name} must be a list, not {value!r:.80}")
    return value


_INDEX = integer(0)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Accept a list of non-negative ids and keep its order."""
    return tuple(_INDEX(name, index) for index in listed(name, value))


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Accept one text or a list of texts, none of them empty; None gives no texts."""
    found = () if value is None else (value,) if isinstance(value, str) else tuple(listed(name, value))
    for text in found:
        if not isinstance(text, str) or not text:
            raise InputError(f"{name} must hold texts that are not empty, not {text!r:.80}")
    return found


_BIAS = number(-100.0, 100.0)


def biases(name: str, value: Any) -> dict[int, float]:
    """Accept a mapping from ids, which JSON writes as text, to numbers."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must map token ids to numbers, not {value!r:.80}")
    pairs = {}
    for key, bias in value.items():
        index = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        pairs[_INDEX(f"{name} token id", index)] = _BIAS(name, bias)
    return pairs
