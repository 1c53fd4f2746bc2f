"""Bucketing strategies by name, imported on first use.

Other packages add theirs in the entry-point group "llmc.strategies" (registry.py). The values of each rule are
available separately: `llmc.buckets.strategies.linear.values(min, step, max)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.errors import UnknownNameError
from llmc.registry import Registry

if TYPE_CHECKING:
    from llmc.buckets.strategies.base import Strategy

DEFAULT_STRATEGY = "linear"

STRATEGIES = Registry(
    "bucketing strategy",
    "llmc.strategies",
    {
        "exponential": "llmc.buckets.strategies.exponential:Exponential",
        "linear": "llmc.buckets.strategies.linear:Linear",
        "padding-aware": "llmc.buckets.strategies.padding_aware:PaddingAware",
        "powers-of-two": "llmc.buckets.strategies.powers_of_two:PowersOfTwo",
        "powers-of-two-tpu": "llmc.buckets.strategies.powers_of_two:PowersOfTwoTPU",
        "traffic": "llmc.buckets.strategies.traffic:TrafficStrategy",
    },
)
"""Classes that take no arguments."""


FILE = "file"
"""The strategy without a rule: a file lists the buckets (planner/bucket_file.py)."""

TRAFFIC = "traffic"


def names() -> list[str]:
    """Return all strategies, sorted."""
    return sorted([*STRATEGIES.names(), FILE])


def create(name: str) -> Strategy:
    """Create a strategy by name, other than `FILE`. Raises UnknownNameError, listing the known names."""
    try:
        built: Strategy = STRATEGIES.get(name)()
    except UnknownNameError:
        raise UnknownNameError("bucketing strategy", name, names()) from None
    return built
