"""Seconds of any shape from measured shapes: exact where measured, interpolated between, extrapolated outside.

Guarantees, up to rounding, for any set of measurements:

- a measured shape has its measured seconds, exactly; every shape has seconds above 0;
- when the measured seconds never fall as a shape grows, the result never falls either, anywhere;
- a shape in a cell of the grid that measured values span lies between the least and the most of the cell's corners
  (up to MAX_NODES corners).

Inside the measured box the rule is multilinear in batch, query and context, not in their logarithms. It reproduces the
terms of a step's cost (`AffineModel`), which are products of single dimensions. Only the attention among a prompt's own
new tokens, quadratic in query, comes out slightly high between two queries.
"""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Phase
from llmc.buckets.cost.work import least_of_larger

MAX_NODES = 1 << 20
"""Most corners of the grid that measured values span; shapes beyond it are bounded by measured ones, see `Surface`."""

MAX_ESTIMATES = 1 << 25
"""Most pairs of an unmeasured grid corner and a measurement; beyond it, the same rule as for MAX_NODES applies."""

_PAIRS_AT_ONCE = 1 << 20


class Surface:
    """Seconds over (batch, query, context) of one phase, from distinct `points` [n, 3] and their `seconds` [n].

    The distinct measured values of each dimension span a grid. An unmeasured corner gets the affine model times the
    ratio measured / model of the measured points, weighted by 1 / distance² in (log batch, log query, log (query +
    context)). The result is at most the time of any larger measured shape and at least that of any smaller corner.
    Where the grid is too large (scattered measurements), a shape gets the model's seconds, bounded by measured shapes
    in the same way.

    Above the box the seconds of the nearest shape in it grow by the model's difference, scaled by the ratio at the
    box's top corner. Below the box they are at most the model times the highest measured ratio.
    """

    def __init__(self, phase: Phase, points: Floats, seconds: Floats) -> None:
        self._points, self._seconds = points, seconds
        self._model = AffineModel(phase, points, seconds)
        self._ratios = seconds / self._model.seconds(points)
        self._axes = [np.unique(column) for column in points.T]
        self._lowest = np.array([axis[0] for axis in self._axes])
        self._highest = np.array([axis[-1] for axis in self._axes])
        nodes = prod(len(axis) for axis in self._axes)
        fits = nodes <= MAX_NODES and (nodes - len(points)) * len(points) <= MAX_ESTIMATES
        self._grid = self._complete() if fits else None
        top = self._highest[None, :]
        self._top_ratio = self._inside(top)[0] / self._model.seconds(top)[0]

    def __call__(self, points: Floats) -> Floats:
        """Return the seconds [m] at `points` [m, 3]."""
        raised = np.maximum(points, self._lowest)
        nearest = np.minimum(raised, self._highest)
        growth = self._model.raw(raised) - self._model.raw(nearest)
        seconds: Floats = self._inside(nearest) + self._top_ratio * growth
        below = np.any(points < self._lowest, axis=1)
        scaled = self._ratios.max() * self._model.seconds(points)
        seconds[below] = np.minimum(seconds, scaled)[below]
        return seconds

    def _inside(self, points: Floats) -> Floats:
        if self._grid is None:
            return self._bounded(points)
        steps: list[tuple[tuple[NDArray[np.intp], Floats], ...]] = []
        for axis, column in zip(self._axes, points.T, strict=True):
            if len(axis) == 1:
                steps.append(((np.zeros(len(column), np.intp), np.ones(len(column))),))
                continue
            lower = np.clip(np.searchsorted(axis, column, "right") - 1, 0, len(axis) - 2)
            part = (column - axis[lower]) / (axis[lower + 1] - axis[lower])
            steps.append(((lower, 1 - part), (lower + 1, part)))
        seconds = np.zeros(len(points))
        for (i, weight_i), (j, weight_j), (k, weight_k) in product(*steps):
            seconds += weight_i * weight_j * weight_k * self._grid[i, j, k]
        return seconds

    def _complete(self) -> Floats:
        shape = [len(axis) for axis in self._axes]
        indices = tuple(np.searchsorted(axis, column) for axis, column in zip(self._axes, self._points.T, strict=True))
        known = np.zeros(shape, bool)
        known[indices] = True
        least = np.zeros(shape)
        most = np.full(shape, np.inf)
        least[indices] = most[indices] = self._seconds
        missing = np.nonzero(~known)
        if not len(missing[0]):
            return least
        most = least_of_larger(most)
        corners = np.stack([axis[indices] for axis, indices in zip(self._axes, missing, strict=True)], axis=1)
        least[missing] = np.minimum(self._estimate(corners), most[missing])
        grid = _most_of_smaller(least)
        grid[indices] = self._seconds
        return grid

    def _estimate(self, points: Floats) -> Floats:
        """The model times the ratios of nearby measured points; no point may be a measured one."""
        measured, logarithms = _log_coordinates(self._points), np.log(self._ratios)
        result = self._model.seconds(points)
        for part in _slices(len(points), len(measured)):
            offsets = _log_coordinates(points[part])[:, None, :] - measured
            weights = 1 / np.sum(offsets**2, axis=2)
            result[part] *= np.exp(weights @ logarithms / weights.sum(axis=1))
        return result

    def _bounded(self, points: Floats) -> Floats:
        result = self._model.seconds(points)
        for part in _slices(len(points), len(self._points)):
            smaller = np.all(self._points <= points[part][:, None, :], axis=2)
            larger = np.all(self._points >= points[part][:, None, :], axis=2)
            low = np.where(smaller, self._seconds, 0).max(axis=1)
            high = np.where(larger, self._seconds, np.inf).min(axis=1)
            same = smaller & larger
            bounded = np.minimum(np.maximum(result[part], low), high)
            result[part] = np.where(same.any(axis=1), self._seconds[same.argmax(axis=1)], bounded)
        return result


def running_maximum(points: Floats, seconds: Floats) -> Floats:
    """Return, for each of `points` [n, 3], the maximum seconds of all points that are not larger in any dimension."""
    result = seconds.copy()
    for part in _slices(len(points), len(points)):
        smaller = np.all(points <= points[part][:, None, :], axis=2)
        result[part] = np.where(smaller, seconds, 0).max(axis=1)
    return result


def _slices(rows: int, columns: int) -> list[slice]:
    """Slices of rows that keep a [rows, columns] array small."""
    step = max(1, _PAIRS_AT_ONCE // max(1, columns))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _log_coordinates(points: Floats) -> Floats:
    batch, query, context = points.T
    result: Floats = np.log(np.stack([batch, query, query + context], axis=1))
    return result


def _most_of_smaller(grid: Floats) -> Floats:
    for axis in range(grid.ndim):
        grid = np.maximum.accumulate(grid, axis=axis)
    return grid


Floats = NDArray[np.float64]

FLOOR = 1e-3
"""Lower bound of the model, as a fraction of the shortest measurement; keeps it positive where all its terms are 0."""

LEFT_OUT = 256
"""Most points that `leave_one_out` leaves out, evenly spread over the measurements."""

_EQUALLY_GOOD = 1e-9


class AffineModel:
    """The seconds of one phase's steps: relative least squares over `points` [n, 3] (batch, query, context), n ≥ 1.

    A transformer step costs a fixed time to read weights and launch, and time per new token (linear layers), per key
    that a new token attends to, and per cached token that is read:

        prompt   a + b · batch·query + c · batch·query·(query/2 + context) + d · batch·context
        decode   a + b · batch       + c · batch·context

    No coefficient is negative. The model therefore never falls as a shape grows, and neither does its difference
    between two queries as batch or context grow. The same holds for every pair of dimensions. Extrapolation relies on
    both properties.

    The solver is exact non-negative least squares: it solves every subset of terms without bounds and keeps the best
    one without a negative coefficient. Ties go to the smallest subset, in the order of `_terms`. One prompt measurement
    therefore means seconds proportional to batch · query, and one decode measurement a constant.
    """

    def __init__(self, phase: Phase, points: Floats, seconds: Floats) -> None:
        self._phase: Phase = phase
        self._floor = FLOOR * float(seconds.min())
        self._coefficients = _non_negative_least_squares(_terms(phase, points) / seconds[:, None])

    def raw(self, points: Floats) -> Floats:
        """Return the formula's seconds at `points` [m, 3], at least 0."""
        result: Floats = _terms(self._phase, points) @ self._coefficients
        return result

    def seconds(self, points: Floats) -> Floats:
        """Return the model's seconds at `points` [m, 3], above 0."""
        return np.maximum(self.raw(points), self._floor)


def leave_one_out(phase: Phase, points: Floats, seconds: Floats) -> float | None:
    """Return the median of |model / measured − 1|, each point predicted by the others' model; None for one point."""
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
    """Terms of the model [m, number of terms], in order of preference among equally good fits."""
    batch, query, context = points.T
    one = np.ones(len(points))
    if phase == "decode":
        return np.stack([one, batch * context, batch], axis=1)
    tokens = batch * query
    return np.stack([tokens, one, tokens * (query / 2 + context), batch * context], axis=1)


def _non_negative_least_squares(relative_terms: Floats) -> Floats:
    """Coefficients ≥ 0 that minimise Σ (relative_terms · coefficients − 1)²."""
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
