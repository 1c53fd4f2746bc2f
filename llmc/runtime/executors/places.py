"""Which places of a slot hold which tokens of a tensor: one for each, or those of a ring (runtime/cache_shape.py).

Arrays are [..., places, width].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheTensor


def places_of(t: CacheTensor, start: int, end: int) -> slice | NDArray[np.int64]:
    """Where tokens `start` … `end` − 1 are, or of a ring the last of them, in order."""
    return slice(start, end) if t.ring is None else np.arange(max(start, end - t.ring), end) % t.ring


def free_places(places: int, start: int, used: int) -> NDArray[np.int64]:
    """Of so many places of a slot that has held `used` tokens those that hold none of the first `start`."""
    return np.arange(start, min(max(used, places), start + places)) % places


def windows(
    t: CacheTensor, held: NDArray[Any], length: int, places: slice | NDArray[np.int64] | None = None
) -> NDArray[Any]:
    """[..., length, width]: the first `length` tokens of a slot, a view; of a ring what a later step may still see, and
    zeros. `places`: where that is, unless it lies as rings say."""
    if t.ring is None:
        return held[..., :length, :]
    first = t.seen(length).start
    found = np.zeros((*held.shape[:-2], length, held.shape[-1]), held.dtype)
    found[..., first:, :] = held[..., places_of(t, first, length) if places is None else places, :]
    return found
