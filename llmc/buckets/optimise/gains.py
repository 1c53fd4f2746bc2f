"""The savings of all buckets of a grid, computed at once."""

from __future__ import annotations

import numpy as np

from llmc.buckets.optimise.demand import Costs, sums
from llmc.buckets.optimise.instance import Indices
from llmc.buckets.optimise.space import product

HEADROOM = 1.5
"""Factor above the last seen values up to which a client's stretches are kept."""


class FacilityLines:
    """A grid of facilities, and clients on it; the facilities along the longest dimension form a line.

    costs      float64, one axis a dimension, infinite where there is no facility
    places     int64 [n, d], the grid indices of the clients; a facility covers a client when none of its indices is
               smaller
    weights    float64 [n], above 0

    On a line, the facilities that cover a client and cost less than some value are one stretch. It starts at the
    client's index and ends where the ascending costs reach the value. Sums over clients are thus differences of running
    sums, in O(lines · clients + facilities) for all facilities instead of O(clients · facilities). Stretches that are
    empty at `HEADROOM` times the last seen values are left out.

    Where costs descend along a line (a list's buckets that share a cell), they are lowered until they ascend. Savings
    are then overstated, never understated.
    """

    def __init__(self, costs: Costs, indices: Indices, weights: Costs) -> None:
        self.shape = costs.shape
        self._axis = int(np.argmax(self.shape))
        self._others = tuple(np.delete(self.shape, self._axis))
        self._weights = weights
        rows = np.moveaxis(costs, self._axis, -1).reshape(-1, self.shape[self._axis])
        self._real = np.isfinite(rows)
        self._rows = np.flip(np.minimum.accumulate(np.flip(rows, 1), 1), 1)
        self._finite = np.where(self._real, self._rows, 0.0)
        self._known = np.unique(costs[np.isfinite(costs)])
        ranks, every = np.searchsorted(self._known, self._rows), np.arange(len(self._known) + 1)
        self._cheaper = np.stack([np.searchsorted(row, every).astype(np.int32) for row in ranks])
        corners = product([np.arange(size) for size in self._others])
        covers = (corners[:, None] >= np.delete(indices, self._axis, axis=1)[None]).all(2)
        line, client = np.nonzero(covers)
        self._pairs = np.stack([line, client, indices[client, self._axis]])
        self._least = self._rows[line, self._pairs[2]]
        self.focus(np.zeros(len(weights)))

    def focus(self, values: Costs) -> None:
        """Keep the stretches for about these values; `gains` keeps more for larger ones."""
        self._limits = HEADROOM * values
        self._line, self._client, self._start = self._pairs[:, self._least < self._limits[self._pairs[1]]]
        self._offset = self._line * (self._rows.shape[1] + 1)
        self._begun = self._events(self._offset + self._start, self._weights[self._client])

    def gains(self, values: Costs) -> Costs:
        """Return by how much the total cost falls when a facility is added to a choice that serves the clients at
        `values`.

        float64, for each facility in the order of the flat grid: Σ weight · max(0, value − its cost) over the clients
        that it covers.
        """
        if (values > self._limits).any():
            self.focus(np.maximum(values, self._limits / HEADROOM))
        ends = self._offset + np.maximum(self._start, self._ends(values))
        amounts, weights = (self._weights * values)[self._client], self._weights[self._client]
        total = self._running(self._events(self._offset + self._start, amounts) - self._events(ends, amounts))
        weight = self._running(self._begun - self._events(ends, weights))
        gains = np.where(self._real, np.maximum(total - self._finite * weight, 0.0), 0.0)
        return np.moveaxis(gains.reshape(*self._others, -1), -1, self._axis).ravel()

    def cheaper_than(self, values: Costs, most: int) -> tuple[Indices, Indices]:
        """Return pairs of a flat facility and a client that it covers at less than the client's value.

        Of more than `most` pairs, those at the start of each stretch.
        """
        self.focus(values)
        sizes = np.maximum(self._ends(values) - self._start, 0)
        if sizes.sum() > most:
            sizes = np.minimum(sizes, most // len(sizes))
        stretch = np.repeat(np.arange(len(sizes)), sizes)
        index = self._start[stretch] + np.arange(len(stretch)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        line = self._line[stretch]
        real = self._real[line, index]
        facilities = np.moveaxis(np.arange(self._real.size).reshape(self.shape), self._axis, -1)
        return facilities.reshape(self._real.shape)[line[real], index[real]], self._client[stretch[real]]

    def _ends(self, values: Costs) -> Indices:
        """For each stretch, the index on its line from which on costs are at least the client's value."""
        below = np.searchsorted(self._known, values)
        ends: Indices = self._cheaper[self._line, below[self._client]].astype(np.int64)
        return ends

    def _events(self, at: Indices, amounts: Costs) -> Costs:
        """Sum the amounts at each index, line by line; each line has one extra index at its end."""
        return sums(at, amounts, self._rows.size + len(self._rows))

    def _running(self, events: Costs) -> Costs:
        """Running sums up to each facility of its line."""
        return np.cumsum(events.reshape(len(self._rows), -1)[:, :-1], axis=1)
