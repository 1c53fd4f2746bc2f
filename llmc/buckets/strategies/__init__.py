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
    "linear": "llmc.buckets.strategies.linear:Linear",
}


def names() -> list[str]:
    """The strategies that `create` knows, sorted."""
    return sorted(_STRATEGIES)


def create(name: str) -> Strategy:
    """A new strategy by name. Raises UnknownNameError, listing the known names."""
    if name not in _STRATEGIES:
        raise UnknownNameError("bucketing strategy", name, _STRATEGIES)
    module, _, constructor = _STRATEGIES[name].partition(":")
    return cast("Strategy", getattr(import_module(module), constructor)())
