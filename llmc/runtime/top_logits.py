"""The largest logits of each row: found by the device, so that the others need not be fetched, or on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The K largest logits of each row, best first; of equal ones the lower ids first, at the K-th place too.

    values [B, K] float32, ids [B, K] int64.
    """

    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]

    @property
    def count(self) -> int:
        """K."""
        return int(self.values.shape[1])

    def rows(self, rows: Any) -> TopLogits:
        """These rows only: anything that indexes the first axis of an array and keeps it."""
        return TopLogits(self.values[rows], self.ids[rows])


def top_of(logits: npt.NDArray[np.float32], k: int) -> TopLogits:
    """The `k` largest of each row [B, V], descending; of equal values the lower id comes first, and is in."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    return TopLogits(np.take_along_axis(logits, ids, axis=-1), ids)
