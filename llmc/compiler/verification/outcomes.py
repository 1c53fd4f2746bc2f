"""Outcomes of verification from the store, which others may have written: whether one is of the form that is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from llmc.compiler.verification.parts import Once

if TYPE_CHECKING:
    from llmc.compiler.verification.parts import Part

Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(one) for one in value)


_BUCKET: Mapping[str, Check] = {
    "runs": _count, "kl": _list(_number), "equal": _list(lambda value: isinstance(value, bool)), "max_abs": _number,
    "leak": _number, "longest": _count, "executables": _list(_text), "beyond": _count,
    "unreached": _count,
}  # fmt: skip
_GREEDY: Mapping[str, Check] = {"sequences": _count, "differing": _list(_text)}
_ACCURACY: Mapping[str, Check] = {
    "tokens": lambda value: _count(value) and value > 0, "mean_kl": _number, "p99_kl": _number, "max_kl": _number,
    "top1": _number, "parts": lambda value: isinstance(value, dict) and all(map(_number, value.values())),
    "text": _text, "perplexity": _number_or_none, "reference_perplexity": _number_or_none,
}  # fmt: skip


def readable(part: Part, outcome: Mapping[str, Any]) -> bool:
    """Whether `outcome` is what a run of `part` leaves, as far as its form tells; else the part is run."""
    if part == "greedy":
        return _has(outcome, _GREEDY)
    if part == "accuracy":
        return isinstance(outcome.get("accuracy"), dict) and _has(outcome["accuracy"], _ACCURACY)
    bucket, runs = (part.bucket, 1) if isinstance(part, Once) else (part, 2)
    if outcome.get("bucket") != str(bucket) or outcome.get("runs") != runs or not _has(outcome, _BUCKET):
        return False
    return len(outcome["kl"]) == len(outcome["equal"]) and _count(outcome.get("top_differs", 0))


def _has(found: Mapping[str, Any], wanted: Mapping[str, Check]) -> bool:
    return all(name in found and check(found[name]) for name, check in wanted.items())
