"""Bucketing strategies by name, each imported when it is first asked for.

The values of each rule can be had alone: `llmc.buckets.strategies.linear.values(min, step, max)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from llmc.errors import UnknownNameError

if TYPE_CHECKING:
    from llmc.buckets.strategies.base import Strategy

DEFAULT_STRATEGY = "linear"

# name → "module:class", the class taking no arguments
_STRATEGIES = {
    "exponential": "llmc.buckets.strategies.exponential:Exponential",
    "linear": "llmc.buckets.strategies.linear:Linear",
    "padding-aware": "llmc.buckets.strategies.padding_aware:PaddingAware",
    "powers-of-two": "llmc.buckets.strategies.powers_of_two:PowersOfTwo",
    "powers-of-two-tpu": "llmc.buckets.strategies.powers_of_two:PowersOfTwoTPU",
    "traffic": "llmc.buckets.strategies.traffic:Traffic",
}


FILE = "file"
"""The strategy that has no rule: the buckets stand in a file, see from_file.py."""

TRAFFIC = "traffic"


def names() -> list[str]:
    """Every strategy, sorted."""
    return sorted([*_STRATEGIES, FILE])


def create(name: str) -> Strategy:
    """A new strategy by name, other than `FILE`. Raises UnknownNameError, listing the known names."""
    if name not in _STRATEGIES:
        raise UnknownNameError("bucketing strategy", name, names())
    module, _, constructor = _STRATEGIES[name].partition(":")
    return cast("Strategy", getattr(import_module(module), constructor)())
