"""A histogram of padding waste with bounded memory, fine enough for percentiles of reports."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

BINS_PER_UNIT = 1000
"""Bins for a waste of 1 (100%): each is 0.1 percentage points wide, and so is a percentile exact to that."""

LINEAR_BINS = 10 * BINS_PER_UNIT
"""Bins of equal width, up to a waste of 10 (1000%); beyond, each bin is 0.1% wider than the one before."""

TAIL_BINS = 20 * BINS_PER_UNIT
"""Bins beyond a waste of 10: the last one stands for 10·e^20 and above."""


class WasteHistogram:
    """Steps counted by their waste (padded − real) / real."""

    def __init__(self) -> None:
        self._counts = np.zeros(LINEAR_BINS + TAIL_BINS + 1, np.int64)

    def add(self, real: Ints, padded: Ints, times: int = 1) -> None:
        """Count steps of `real` ≥ 1 tokens that ran as `padded` ≥ real ones, so many `times` for each pair [n]."""
        waste = padded / real - 1.0
        bins = np.rint(np.minimum(waste, 10.0) * BINS_PER_UNIT)
        tail = waste > 10.0
        if tail.any():
            bins[tail] += np.rint(np.log(waste[tail] / 10.0) * BINS_PER_UNIT)
            np.minimum(bins, LINEAR_BINS + TAIL_BINS, out=bins)
        self._counts += times * np.bincount(bins.astype(np.int64), minlength=len(self._counts))

    def percentile(self, percent: int) -> float | None:
        """The least waste that at least `percent` (1 to 100) of all steps do not exceed; None without steps.

        Within 0.05 percentage points up to 1000%, within 0.05% of itself beyond.
        """
        steps = int(self._counts.sum())
        if not steps:
            return None
        rank = -(-steps * percent // 100)
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        if place <= LINEAR_BINS:
            return place / BINS_PER_UNIT
        return float(10.0 * np.exp((place - LINEAR_BINS) / BINS_PER_UNIT))
