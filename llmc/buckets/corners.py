"""Minima over all larger corners of a grid: they give the cheapest bucket that covers a corner."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound="np.generic[Any]")


def least_of_larger(grid: NDArray[Number]) -> NDArray[Number]:
    """For each corner, the least of `grid` over the corners that are nowhere smaller, its own too; any dimensions."""
    for axis in range(grid.ndim):
        grid = np.flip(np.minimum.accumulate(np.flip(grid, axis), axis), axis)
    return grid
