"""4-bit blocks that are chosen by what a matrix is multiplied with, so that its products change least.

GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): columns are rounded one after another, and what a column's
rounding changes in the products of typical inputs is made up for by the columns that are left. Those whose inputs are
largest come first, and scales and minimums are fitted before; both are options of the authors' code ("act-order",
"static groups"). Here that fit counts the error of a weight by the mean square of its input, and damping is relative
for each input: a short text says more about how large an input is than about what it goes together with. On inputs that
were not calibrated with, 12 matrices of SmolLM2-135M have the errors of benchmarks/RESULTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.weights.nbits import quantise_q4

Array = NDArray[np.float32]

DAMPING = 0.1
"""Of each value on the products' diagonal, added to it."""
_LEAST = 1e-4
"""Of the mean of that diagonal, which an input counts at least."""
_TOP = 15
_LAZY = 64
"""Columns after which what they changed is taken to all that are left."""


@dataclass(frozen=True)
class Inputs:
    """What the inputs of a matrix say: the mean square of each, to a factor [K], the order of its columns [K], and the
    upper Cholesky factor of the inverse of their damped products, in that order [K, K]."""

    squares: Array
    order: NDArray[np.intp]
    follows: Array

    @classmethod
    def of(cls, products: Array) -> Inputs:
        """By the sum of x xᵀ over inputs x, [K, K]."""
        squares = np.diagonal(products)
        order = np.argsort(-squares, kind="stable")
        damped = products[np.ix_(order, order)].astype(np.float64)
        diagonal = np.einsum("ii->i", damped)
        squares = np.maximum(squares, _LEAST * squares.mean() or 1)
        diagonal[:] = squares[order] * (1 + DAMPING)
        inverse = np.linalg.inv(damped)
        return cls(squares, order, np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32))


def gptq4(weight: Array, inputs: Inputs, block: int) -> tuple[NDArray[np.uint8], Array, Array]:
    """Codes uint8 [N, K/block, block], scales and minimums float32 [N, K/block] of `weight` [N, K], K a multiple of
    `block`: w ≈ scale · code + minimum, which float16 holds."""
    rows, width = weight.shape
    _, scales, offsets = quantise_q4(weight, block, inputs.squares)
    scales, minimums = _half(scales), _half(offsets - np.float32(8) * scales)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    order, follows = inputs.order, inputs.follows
    scales_of, minimums_of, inverse_of = (np.ascontiguousarray(x.T) for x in (scales, minimums, inverse))
    left = np.ascontiguousarray(weight.T[order])  # a column of the matrix is a row here
    codes = np.empty((width, rows), np.uint8)
    for start in range(0, width, _LAZY):
        own = left[start : start + _LAZY]
        errors = np.empty_like(own)
        for at in range(len(own)):
            column = order[start + at]
            scale, minimum = scales_of[column // block], minimums_of[column // block]
            code = np.clip(np.rint((own[at] - minimum) * inverse_of[column // block]), 0, _TOP)
            codes[column] = code
            step = follows[start + at, start + at : start + len(own)]
            errors[at] = (own[at] - (scale * code + minimum)) / step[0]
            own[at + 1 :] -= step[1:, None] * errors[at]
        left[start + _LAZY :] -= follows[start : start + _LAZY, start + _LAZY :].T @ errors
    return np.ascontiguousarray(codes.T).reshape(rows, -1, block), scales, minimums


def _half(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)
