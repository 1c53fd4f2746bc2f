"""What the solvers hand to `choose`."""

from __future__ import annotations

from typing import NamedTuple

from llmc.buckets.optimise.demand import Points


class Found(NamedTuple):
    """Buckets (int64 [k, d], the required ones among them), their cost, and a lower bound on any choice's cost."""

    buckets: Points
    cost: float
    bound: float
