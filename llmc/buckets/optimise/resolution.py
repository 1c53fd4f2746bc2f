"""Fewer levels: the ones to keep so that rounding up to them costs the demand least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmc.buckets.optimise.demand import Costs, sums
from llmc.buckets.optimise.instance import Instance, Places

LEAST_SHARE = 1e-9
"""A dimension's share of the levels is at least this part of the largest share, which keeps their product above 0."""


def coarse_levels(instance: Instance, cells: int) -> list[Places]:
    """For each dimension the ascending indices of the levels to keep, their product at most about `cells`.

    Taken alone, a dimension whose demand has density f (in cost for each unit of length) loses ∫ f · Δ / 2 to levels
    Δ apart. The best spacing is Δ ∝ f^(−1/2), which makes the levels equal steps of ∫ √f; with n of them the loss is
    (∫ √f)² / 2n (Panter and Dite's rule for quantisers, with a linear loss). So the least sum of the losses under a
    fixed product has n ∝ (∫ √f)². A dimension never gets more levels than it has.
    """
    roots = [_cumulated_root(instance, axis) for axis in range(len(instance.levels))]
    largest = max(float(root[-1]) for root in roots) or 1.0
    counts = [1] * len(roots)
    open_axes = [axis for axis, size in enumerate(instance.shape) if size > 1]
    left = float(cells)
    while open_axes:
        share = [max((float(roots[axis][-1]) / largest) ** 2, LEAST_SHARE) for axis in open_axes]
        scale = (left / float(np.prod(share))) ** (1 / len(open_axes))
        full = [axis for axis, part in zip(open_axes, share, strict=True) if part * scale >= instance.shape[axis]]
        for axis in full:
            counts[axis] = instance.shape[axis]
            left = max(left / counts[axis], 1.0)
        if not full:
            for axis, part in zip(open_axes, share, strict=True):
                counts[axis] = max(2, int(part * scale))
            break
        open_axes = [axis for axis in open_axes if axis not in full]
    return [_equal_steps(root, count) for root, count in zip(roots, counts, strict=True)]


def with_corners(instance: Instance, kept: Sequence[Places], cells: int) -> list[Places]:
    """The kept levels and those of the largest clients that no bucket would cover after rounding up.

    Rounding up can lead beyond a limit on products such as batch · query. A client below one whose levels are all
    kept is rounded up to that one at most, so that the levels of the largest clients are enough. They are added as
    long as the product of the numbers of levels is at most `cells`.
    """
    levels = list(kept)
    coarse = np.stack([each[np.searchsorted(each, instance.places[:, axis])] for axis, each in enumerate(kept)], axis=1)
    left = np.flatnonzero(np.isinf(instance.cheapest(coarse)[1]))
    while left.size:
        corner = instance.places[left[np.argmax(instance.own[left])]]
        more = [np.union1d(each, [place]) for each, place in zip(levels, corner, strict=True)]
        if np.prod([len(each) for each in more]) > cells:
            break
        levels = more
        left = left[(instance.places[left] > corner).any(1)]
    return levels


def _cumulated_root(instance: Instance, axis: int) -> Costs:
    """∫ √f up to each level, a level's demand being spread from the level below up to it."""
    levels = instance.levels[axis]
    density = instance.weights * instance.own / (instance.points(instance.places)[:, axis] + 1.0)
    mass = sums(instance.places[:, axis], density, len(levels))
    return np.cumsum(np.sqrt(mass * np.diff(levels, prepend=min(0, int(levels[0])))))


def _equal_steps(root: Costs, count: int) -> Places:
    if count >= len(root):
        return np.arange(len(root))
    targets = root[-1] * np.arange(1, count + 1) / count
    return np.unique(np.append(np.minimum(np.searchsorted(root, targets), len(root) - 1), len(root) - 1))
