"""The largest logits of rows on the host, by the rule that every executor keeps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.engine.sampling.top import TopLogits


def top_of(logits: NDArray[np.float32], k: int) -> TopLogits:
    """The `k` largest of each row [B, V], descending; of equal values the lower id comes first, and is in."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    return TopLogits(np.take_along_axis(logits, ids, axis=-1), ids)
