"""Products with matrices in 8 bits and a scale for each row, as formats.py describes them.

y = (x · codesᵀ) · scale, with the codes cast to x's dtype, which holds them exactly, and sums in float32. XLA reads the
codes inside the product on TPUs, and in Triton's fusions on NVIDIA's cards; on CPU it makes copies of the matrices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

Array = Any


class Quantised(NamedTuple):
    """A matrix: codes [.., N, K], scale [.., N]; a tree of arrays, which a scan takes apart by layers."""

    codes: Array
    scale: Array

    def product(self, x: Array, precision: Any) -> Array:
        """[…, K] × [N, K] → […, N] in x's dtype."""
        out = lax.dot_general(
            x, self.codes.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())), precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return (out * self.scale).astype(x.dtype)

    def rows(self, indices: Array) -> Array:
        """Rows by number, in float32: indices […] → […, K]."""
        codes, scale = (jnp.take(part, indices, axis=0, mode="clip") for part in self)
        return codes.astype(jnp.float32) * scale[..., None]
