"""4-bit blocks that are chosen by what a matrix is multiplied with, so that its products change least.

GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): columns are rounded one after another, and what a column's
rounding changes in the products of typical inputs is made up for by the columns that are left. Those whose inputs are
largest come first, and scales and minimums are fitted before (nbits.py); both are options of the authors' code
("act-order", "static groups").

Inputs are those of the quantised model, X, and the products that are wanted those of the float one, W X'. They are
nearest to those of another matrix, W X' Xᵀ (X Xᵀ)⁻¹, which is rounded in the place of W (asymmetric calibration, as in
GPTAQ, Li et al. 2025, https://arxiv.org/abs/2504.02692, where the difference is taken in column by column).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.weights.nbits import quantise_q4

Array = NDArray[np.float32]

DAMPING = 0.01
"""Of the mean of the products' diagonal, added to it: GPTQ's own."""
_TOP = 15
_LAZY = 64
"""Columns after which what they changed is taken to all that are left."""


@dataclass(frozen=True)
class Inputs:
    """What the inputs of a matrix say: the order of its columns [K], the upper Cholesky factor of the inverse of their
    damped products, in that order [K, K], and by which multiple of itself, W · `shift`, a matrix W changes first
    [K, K]."""

    order: NDArray[np.intp]
    follows: Array
    shift: Array

    @classmethod
    def of(cls, products: Array, drift: Array) -> Inputs:
        """By the sums over inputs x of x xᵀ and (x' − x) xᵀ, with x' what the float model has in the place of x,
        [K, K]. An input that is always 0 is alone."""
        damped = products.astype(np.float64)
        diagonal = np.einsum("ii->i", damped)
        order = np.argsort(-diagonal, kind="stable")
        diagonal[diagonal == 0] = 1
        diagonal += DAMPING * diagonal.mean()
        inverse = np.linalg.inv(damped)
        ordered = inverse[np.ix_(order, order)]
        follows = np.linalg.cholesky((ordered + ordered.T) / 2).T
        return cls(order, follows.astype(np.float32), (drift @ inverse).astype(np.float32))


def gptq4(weight: Array, inputs: Inputs, block: int) -> tuple[NDArray[np.uint8], Array, Array]:
    """Codes uint8 [N, K/block, block], scales and minimums float32 [N, K/block] of `weight` [N, K], K a multiple of
    `block`: w ≈ scale · code + minimum, which float16 holds."""
    rows, width = weight.shape
    weight = weight + weight @ inputs.shift
    _, scales, offsets = quantise_q4(weight, block)
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
