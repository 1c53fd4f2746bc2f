"""The largest logits of each row, selected on the device to reduce transfers, or on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The K largest logits of each row, best first; ties are ordered by lower id, also at the K-th entry.

    values [B, K] float32, ids [B, K] int64.
    """

    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]

    @property
    def count(self) -> int:
        """K, the number of logits per row."""
        return int(self.values.shape[1])

    def rows(self, rows: Any) -> TopLogits:
        """Select rows with any index that keeps the first axis."""
        return TopLogits(self.values[rows], self.ids[rows])


def top_of(logits: npt.NDArray[np.float32], k: int) -> TopLogits:
    """The `k` largest of each row of [B, V], descending; ties are ordered, and kept, by lower id."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    return TopLogits(np.take_along_axis(logits, ids, axis=-1), ids)
