"""Which matrices stay in 8 bits, so that a quantised model keeps a bound on its divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupCost:
    """Matrices that share a format, by name, with `weights` together; and the mean divergence in nats of a model in
    which they alone are in 4 bits."""

    names: tuple[str, ...]
    weights: int
    divergence: float


def widened(
    costs: Sequence[GroupCost], wide: frozenset[str], measured: float, bound: float, fixed: float = 0.0
) -> frozenset[str]:
    """Names of the matrices in 8 bits that may keep `bound`, where with those of `wide` in 8 bits `measured`, which is
    more, was the divergence of the whole model.

    Small independent errors of logits add up in the divergence: it is predicted as the sum of the costs of what is in
    4 bits, times the factor that this sum was wrong by. The dearest for its weights comes first, and one at least.
    `fixed`: the cost of what stays in 4 bits in any case.
    """
    narrow = sorted((c for c in costs if not wide.issuperset(c.names)), key=lambda c: c.divergence / c.weights)
    left = fixed + sum(cost.divergence for cost in narrow)
    factor = measured / left if left else 0.0
    while narrow:
        cost = narrow.pop()
        wide = wide.union(cost.names)
        left -= cost.divergence
        if left * factor <= bound:
            break
    return wide
