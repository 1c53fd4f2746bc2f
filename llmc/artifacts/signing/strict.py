"""JSON that can be read in one way only: whatever two readers could take differently is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def strict_json(data: bytes) -> dict[str, Any]:
    """The JSON object in UTF-8 `data`. Raises ValueError, and nothing else.

    Refused are members that occur twice, NaN and infinities, nesting beyond Python's limit, and anything around
    the object.
    """
    try:
        found = json.loads(data.decode(), object_pairs_hook=_members, parse_constant=_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member occurs twice in one object")
    return members


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
