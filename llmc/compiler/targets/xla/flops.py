"""Floating point operations of a JAX function's products, from its jaxpr: 2 · B · M · N · K each.

XLA's own count takes the body of a loop once, however often it runs; a step of rolled layers is mostly loop.
"""

from __future__ import annotations

import math
from typing import Any


def product_flops(jaxpr: Any) -> int:
    """Of all `dot_general`s of a (closed) jaxpr, those of a scan's body as often as it runs."""
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(left[d] for d in contracted)
            continue
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                total += times * product_flops(value)
    return total
