"""Strict JSON: text that two parsers could read differently is refused."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


class AmbiguousError(ValueError):
    """JSON that Python accepts but other parsers read differently or refuse."""


def loads(data: bytes | str) -> Any:
    """Parse `data`. Raises only ValueError, as AmbiguousError for text that only Python accepts.

    That is a duplicate member, NaN, infinity, a number too large for a float, or nesting beyond Python's limit.
    """
    try:
        return json.loads(data, object_pairs_hook=_members, parse_constant=_constant, parse_float=_number)
    except RecursionError as error:
        raise AmbiguousError("nested too deeply") from error


def loads_object(data: bytes) -> dict[str, Any]:
    """Parse the JSON object in UTF-8 `data`. Raises what `loads` raises."""
    found = loads(data.decode())
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise AmbiguousError("a member occurs twice in one object")
    return members


def _constant(text: str) -> NoReturn:
    raise AmbiguousError(f"{text} is not a JSON number")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise AmbiguousError(f"{text:.40} is out of range")
    return value
