"""Filters which tokens may be drawn, and draws: arithmetic on one row or on a part of it, in the order of ids.

Ties always go to the lower ids. Weights are relative to the largest logit, whose weight is 1.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_GROUPS = 64
_SMALL = 2048
"""Up to this many values, a plain search is as fast as one by groups."""
_BLOCK = 256
_MASS_STEPS = (1e-2, 1e-4, 1e-6, 0.0)
_BINS_A_NAT = 64
_BINS = 8192


class LogitsRow:
    """Values [V] that can be searched from the top without sorting.

    Value i belongs to group i mod width, of about `groups` values each. Values over a bound are searched only in groups
    whose maximum exceeds it; for a high bound these are few.
    """

    def __init__(self, values: Logits, groups: int = _GROUPS) -> None:
        self.values = values
        self._groups = groups if values.size > _SMALL else 1
        self._width = values.size // self._groups
        if self._groups == 1:
            self._maxima = values
        else:
            self._grid = values[: self._groups * self._width].reshape(self._groups, self._width)
            self._rest = values[self._groups * self._width :]
            self._maxima = self._grid.max(axis=0)

    @property
    def largest(self) -> np.float32:
        """The largest value; NaN if there is one."""
        largest: np.float32 = self._maxima.max()
        if self._groups > 1 and self._rest.size:
            largest = np.maximum(largest, self._rest.max())
        return largest

    def above(self, bound: float) -> Ids:
        """Ascending ids of the values that are at least `bound`."""
        if self._groups == 1:
            return np.flatnonzero(self.values >= bound)
        columns = np.flatnonzero(self._maxima >= bound)
        if columns.size * 12 > self._width:
            return np.flatnonzero(self.values >= bound)
        found = np.flatnonzero(self._grid[:, columns] >= bound)
        ids: Ids = found // columns.size * self._width + columns[found % columns.size] if found.size else found
        if self._rest.size:
            ids = np.concatenate([ids, np.flatnonzero(self._rest >= bound) + self._grid.size])
        return ids

    def top(self, count: int) -> Ids:
        """Ascending ids of the `count` largest values, for `count` in 1 … V.

        The count-th largest group maximum is a lower bound of the count-th largest value.
        """
        if self._groups == 1 or count * 4 > self._width:
            if self._groups > 4 and count * 16 < self.values.size:
                return LogitsRow(self.values, self._groups // 4).top(count)
            position = self.values.size - count
            return best(self.values, np.partition(self.values, position)[position], count)
        position = self._width - count
        ids = self.above(np.partition(self._maxima, position)[position])
        values = self.values[ids]
        kept: Ids = ids[best(values, np.sort(values)[values.size - count], count)]
        return kept


def best(values: Logits, bound: np.float32, count: int) -> Ids:
    """Ascending indices of the values over `bound` and of the first values equal to it, `count` in total."""
    kept: Ids = np.flatnonzero(values >= bound)
    if kept.size > count:
        equal = np.flatnonzero(values[kept] == bound)
        kept = np.delete(kept, equal[equal.size - (kept.size - count) :])
    return kept


def min_p_bound(largest: float, temperature: float, min_p: float) -> float:
    """A logit slightly below the least that min_p keeps, whatever the rounding in `weigh`."""
    distance = -temperature * math.log(min_p)
    return largest - distance - 1e-5 * (distance + temperature) - 1e-6 * abs(largest)


def weigh(values: Logits, largest: np.float32, temperature: np.float32) -> Logits:
    """Each value's weight, exp((values − largest) / temperature)."""
    weights = values - largest
    weights /= temperature
    np.exp(weights, out=weights)
    return weights


def nucleus(weights: Logits, top_p: float) -> Ids:
    """Ascending indices of the fewest largest weights that reach the share `top_p` together; at least one.

    Few tokens carry most of the mass, so a falling threshold finds them without sorting all.
    """
    needed = top_p * float(weights.sum())
    row = LogitsRow(weights)
    for step in _MASS_STEPS:
        ids = row.above(step)
        candidates = weights[ids]
        if float(candidates.sum()) > needed:
            break
    ordered = np.sort(candidates)[::-1]
    count = min(int(ordered.cumsum(dtype=np.float64).searchsorted(needed)) + 1, ordered.size)
    kept: Ids = ids[best(candidates, ordered[count - 1], count)]
    return kept


def typical(weights: Logits, typical_p: float) -> Ids:
    """Ascending indices of the locally typical set, at least one.

    It is the smallest set of tokens with surprise nearest to the entropy that reaches the share `typical_p`. Source:
    Meister et al. 2022, Locally Typical Sampling. A histogram over the distance from the entropy locates where the
    share is reached; only that bin is sorted.
    """
    possible = np.flatnonzero(weights)
    p = weights[possible].astype(np.float64)
    total = float(p.sum())
    surprise = math.log(total) - np.log(weights[possible], dtype=np.float64)
    p /= total
    distance = np.abs(surprise - float((p * surprise).sum()))
    bins = np.minimum(distance * _BINS_A_NAT, _BINS).astype(np.int64)
    reached = np.bincount(bins, p).cumsum()
    last = min(int(reached.searchsorted(typical_p)), reached.size - 1)
    edge = np.flatnonzero(bins == last)
    edge = edge[np.argsort(distance[edge], kind="stable")]
    before = float(reached[last - 1]) if last else 0.0
    count = int(p[edge].cumsum().searchsorted(typical_p - before)) + 1
    kept: Ids = possible[np.sort(np.concatenate([np.flatnonzero(bins < last), edge[:count]]))]
    return kept


def pick(weights: Logits, uniform: float) -> int:
    """Inverse of the cumulative sum at `uniform` in [0, 1): first the block, then the index. Never one of weight 0."""
    if weights.size <= _BLOCK:
        cumulative = weights.cumsum(dtype=np.float64)
        return _reach(cumulative, uniform * float(cumulative[-1]))
    blocks = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK)).cumsum(dtype=np.float64)
    target = uniform * float(blocks[-1])
    block = _reach(blocks, target)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    return block * _BLOCK + _reach(inside, target - (float(blocks[block - 1]) if block else 0.0))


def _reach(cumulative: npt.NDArray[np.float64], target: float) -> int:
    """The first index whose sum exceeds `target`, or the last that adds anything if rounding leaves none."""
    index = int(cumulative.searchsorted(target, side="right"))
    return index if index < cumulative.size else int(cumulative.searchsorted(cumulative[-1]))
