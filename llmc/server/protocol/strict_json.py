"""JSON as RFC 8259 has it, and nothing that would break further on.

Python's reader also takes NaN, Infinity, numbers that overflow, repeated keys, halves of surrogate pairs, other
encodings than UTF-8, and nesting up to its recursion limit: all of them are refused here. What a body holds is counted
before it is read: reading keeps the interpreter to itself, for as long as there are values. A long body is read by
pydantic's reader, which is done with 260,000 numbers in 5 ms instead of 15.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from pydantic_core import from_json

from llmc.errors import InputError
from llmc.server.protocol.bounds import MAX_DEPTH
from llmc.server.protocol.json_counts import PIECE, Counts, check_counts, outside_texts

LONG = 64 << 10
"""Bytes from which a body is long."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NOT_JSON = {
    "recursion limit": f"the body is nested more than {MAX_DEPTH} deep",
    "number out of range": "the body holds an integer of too many digits",
    "hex escape": "the body holds half of a surrogate pair (\\ud800 … \\udfff), or less than \\u and four digits",
    "invalid unicode": "the body is not UTF-8",
}
"""What is wrong with a long body, by what its reader's words hold."""


def loads(raw: bytes) -> Any:
    """The value that `raw` writes. Raises InputError, saying what is wrong and where, for anything else."""
    counts = check_counts(raw)
    return _read_long(raw, counts) if len(raw) >= LONG else _read(raw, counts)


def _read(raw: bytes, counts: Counts) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise InputError(f"the body is not UTF-8: byte {e.start} cannot be read") from None
    try:
        value = json.loads(text, parse_constant=_constant, parse_float=_float, object_pairs_hook=_object)
    except json.JSONDecodeError as e:
        raise InputError(f"the body is not JSON: {e.msg} (line {e.lineno}, column {e.colno})") from None
    except RecursionError:
        raise InputError(f"the body is nested more than {MAX_DEPTH} deep") from None
    except ValueError:  # Python limits integers to some thousand digits
        raise InputError("the body holds an integer of too many digits") from None
    if counts.containers > MAX_DEPTH:
        _check_depth(value)
    if counts.escapes and _SURROGATE.search(text):
        _check_text(value)
    return value


def _read_long(raw: bytes, counts: Counts) -> Any:
    """As `_read`. What its reader would take though it may not be is looked for in the value."""
    try:
        value = from_json(raw, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        said = str(error)
        known = next((words for part, words in _NOT_JSON.items() if part in said), None)
        raise InputError(known or f"the body is not JSON: {said}") from None
    members, overflows = 0, isinstance(value, float) and math.isinf(value)
    for container, kinds in _containers(value):
        members += len(container) if isinstance(container, dict) else 0
        if float in kinds:
            overflows = overflows or any(isinstance(x, float) and math.isinf(x) for x in _items(container))
    if overflows or (members != counts.members and members != outside_texts(raw).members):
        return _read(raw, counts)  # it names the number, or the key that stands twice in one object
    return value


def _constant(name: str) -> NoReturn:
    raise InputError(f"the body holds {name}, which is not JSON")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise InputError(f"the body holds the number {text[:32]}, which is too large")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InputError(f"the body has the key {twice[:80]!r} twice in one object")
    return made


def _check_depth(value: Any) -> None:
    for _ in _containers(value):
        pass


def _containers(value: Any) -> Iterator[tuple[Any, set[type]]]:
    """All lists and objects, level by level, each with the types of what it holds. Raises InputError beyond MAX_DEPTH
    levels."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            kinds = set(map(type, _items(container)))
            yield container, kinds
            if list in kinds or dict in kinds:
                inner += [item for item in _items(container) if isinstance(item, list | dict)]
        level = inner
        if not level:
            return
    raise InputError(f"the body is nested more than {MAX_DEPTH} deep")


def _check_text(value: Any) -> None:
    """Raise InputError for half of a surrogate pair in any text."""
    for text in _texts(value):
        for start in range(0, 0 if text.isascii() else len(text), PIECE):
            try:
                text[start : start + PIECE].encode("utf-8")
            except UnicodeEncodeError:
                raise InputError("the body holds half of a surrogate pair (\\ud800 … \\udfff): not Unicode") from None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for container, _ in _containers(value):
        if isinstance(container, dict):
            yield from container
        yield from (item for item in _items(container) if isinstance(item, str))


def _items(container: Any) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container
