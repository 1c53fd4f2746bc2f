"""The affine model of a step's seconds, fitted to measurements; it estimates shapes that were not measured.

A transformer step costs a fixed time for reading weights and launching, time for every new token (linear layers), for
every key that a new token attends to, and for every token of the cache that is read:

    prompt   a + b · batch·query + c · batch·query·(query/2 + context) + d · batch·context
    decode   a + b · batch       + c · batch·context

No coefficient is negative. The model therefore never falls as a shape grows, and neither does its difference between
two queries as batch or context grow, and so on for every pair of dimensions: extrapolation relies on both.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Phase

Floats = NDArray[np.float64]

FLOOR = 1e-3
"""The model is never below this part of the shortest measurement, so that it is positive where all its terms are 0."""

LEFT_OUT = 256
"""Most points that `leave_one_out` leaves out, evenly spread over the measurements."""

_EQUALLY_GOOD = 1e-9


class AffineModel:
    """The model of one phase: relative least squares over `points` [n, 3] (batch, query, context), n ≥ 1.

    Exact non-negative least squares: every choice of terms is solved without bounds, and the best one without a
    negative coefficient is kept. Of equally good choices the smallest wins, in the order of `_terms`, so that one
    prompt measurement means seconds proportional to batch · query, and one decode measurement a constant.
    """

    def __init__(self, phase: Phase, points: Floats, seconds: Floats) -> None:
        self._phase: Phase = phase
        self._floor = FLOOR * float(seconds.min())
        self._coefficients = _non_negative_least_squares(_terms(phase, points) / seconds[:, None])

    def raw(self, points: Floats) -> Floats:
        """The model's seconds at `points` [m, 3] as the formula says: at least 0."""
        result: Floats = _terms(self._phase, points) @ self._coefficients
        return result

    def seconds(self, points: Floats) -> Floats:
        """The model's seconds at `points` [m, 3], above 0."""
        return np.maximum(self.raw(points), self._floor)


def leave_one_out(phase: Phase, points: Floats, seconds: Floats) -> float | None:
    """Median of |model / measured − 1| over points, each predicted by the model of the others; None for one point."""
    count = len(points)
    if count < 2:
        return None
    errors = []
    for left_out in np.unique(np.linspace(0, count - 1, min(count, LEFT_OUT)).astype(np.intp)):
        others = np.arange(count) != left_out
        model = AffineModel(phase, points[others], seconds[others])
        predicted = model.seconds(points[left_out : left_out + 1])[0]
        errors.append(abs(predicted / seconds[left_out] - 1))
    return float(np.median(errors))


def _terms(phase: Phase, points: Floats) -> Floats:
    """The terms of the model [m, number of terms], in the order of preference among equally good fits."""
    batch, query, context = points.T
    one = np.ones(len(points))
    if phase == "decode":
        return np.stack([one, batch * context, batch], axis=1)
    tokens = batch * query
    return np.stack([tokens, one, tokens * (query / 2 + context), batch * context], axis=1)


def _non_negative_least_squares(relative_terms: Floats) -> Floats:
    """Coefficients ≥ 0 of least Σ (relative_terms · coefficients − 1)²."""
    rows, columns = relative_terms.shape
    scale = np.linalg.norm(relative_terms, axis=0)
    scale[scale == 0] = 1.0
    scaled = relative_terms / scale
    solutions: list[tuple[float, Floats]] = []
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            solution, _, rank, _ = np.linalg.lstsq(scaled[:, chosen], np.ones(rows), rcond=None)
            if rank == size and np.all(solution >= 0):
                coefficients = np.zeros(columns)
                coefficients[list(chosen)] = solution
                solutions.append((float(np.sum((scaled @ coefficients - 1) ** 2)), coefficients / scale))
    bound = min(error for error, _ in solutions) * (1 + _EQUALLY_GOOD) + rows * _EQUALLY_GOOD**2
    return next(coefficients for error, coefficients in solutions if error <= bound)
