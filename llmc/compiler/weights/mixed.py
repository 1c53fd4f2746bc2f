"""Choose the matrices that stay in 8 bits, so that a quantized model keeps a bound on its divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupCost:
    """Matrices that share a format, by name, with `weights` weights in total. `divergence`: mean divergence in nats of
    a model in which only these matrices are in 4 bits."""

    names: tuple[str, ...]
    weights: int
    divergence: float


def widened(
    costs: Sequence[GroupCost], wide: frozenset[str], measured: float, bound: float, fixed: float = 0.0
) -> frozenset[str]:
    """Return the names of the matrices to hold in 8 bits for a divergence of at most `bound`.

    `measured` is the divergence of the model with the matrices of `wide` in 8 bits; it exceeds the bound. `fixed` is
    the cost of matrices that stay in 4 bits in any case.

    Small independent errors of logits add up in the divergence. So the prediction is the sum of the costs of all 4-bit
    matrices, times measured / predicted of the current model. The group with the highest cost per weight is widened
    first; at least one group is.
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
