"""JSON as RFC 8259 has it, and nothing that would break further on.

Python's reader also takes NaN, Infinity, numbers that overflow, repeated keys, halves of surrogate pairs, other
encodings than UTF-8, and nesting up to its recursion limit: all of them are refused here. What a body holds is counted
before it is read: reading keeps the interpreter to itself, for as long as there are values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from llmc.errors import InputError
from llmc.server.protocol.bounds import MAX_CONTAINERS, MAX_DEPTH, MAX_MEMBERS, MAX_VALUES

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(raw: bytes) -> Any:
    """The value that `raw` writes. Raises InputError, saying what is wrong and where, for anything else."""
    _check_counts(raw)
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
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if _SURROGATE.search(text):
        _check_text(value)
    return value


def _check_counts(raw: bytes) -> None:
    """Raise InputError where `raw` has too many values, or lists and objects, or too deep ones; what stands in texts
    is left out where all together would be too much."""
    commas, members, containers = raw.count(b","), raw.count(b":"), raw.count(b"[") + raw.count(b"{")
    if containers <= MAX_CONTAINERS and members <= MAX_MEMBERS and commas + containers <= MAX_VALUES:
        return
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = np.frombuffer(raw, np.uint8)
    data = data[~np.bitwise_xor.accumulate(data == ord('"'))]
    opened = (data == ord("[")) | (data == ord("{"))
    closed = (data == ord("]")) | (data == ord("}"))
    commas, members = (int(np.count_nonzero(data == ord(mark))) for mark in ",:")
    containers = int(np.count_nonzero(opened))
    if containers and int((opened.astype(np.int32) - closed).cumsum().max()) > MAX_DEPTH:
        raise InputError(f"the body is nested more than {MAX_DEPTH} deep")
    if containers > MAX_CONTAINERS:
        raise InputError(f"the body has {containers} lists and objects; at most {MAX_CONTAINERS} are taken")
    if members > MAX_MEMBERS:
        raise InputError(f"the body's objects have {members} members; at most {MAX_MEMBERS} are taken")
    if commas + containers > MAX_VALUES:
        raise InputError(f"the body has {commas + containers} values; at most {MAX_VALUES} are taken")


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
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in _items(outer) if isinstance(item, list | dict)]
        if not level:
            return
    raise InputError(f"the body is nested more than {MAX_DEPTH} deep")


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("the body holds half of a surrogate pair (\\ud800 … \\udfff): not Unicode") from None
