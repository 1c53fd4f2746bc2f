"""Device-independent cost of running a bucket: the work of its padded shape.

Prefill is bound by arithmetic. A token of a transformer passes the linear layers once (24·h² operations per layer,
hidden size h) and attends to every key (4·h operations per layer and key). One token's linear layers therefore weigh as
much as 6·h keys. `TOKEN_WEIGHT` is that for h ≈ 700, near the smallest models served. A larger h makes context cheaper
relative to tokens, and changes the resulting order little.

Decode is bound by memory bandwidth. The weights are read once for every bucket, so the cost excludes them. Padding adds
each row's cache, read up to the bucket's context.

The costs of the two phases are in different units and never compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from llmc.buckets.bucket import Bucket

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKEN_WEIGHT = 4096
"""Keys whose attention costs as much as one token's linear layers."""

STEP_WEIGHT = 1024 * TOKEN_WEIGHT
"""Cost of starting one more prefill: reading the weights and launching, worth about 1024 tokens of computing."""

DECODE_STEP_WEIGHT = 1 << 17
"""Cost of one more decode step, in cached tokens read: the weights of an 8B model in bf16 (16 GB) against its 128 KiB
of cache a token."""


def cost(bucket: Bucket) -> int:
    """Return the padded work of one run, strictly increasing in each of batch, query and context (lookup relies on
    this).

    Prompt: keys attended, batch · query · (TOKEN_WEIGHT + query + context). Decode: cached tokens read, batch · (1 +
    context).
    """
    if bucket.phase == "decode":
        return bucket.batch * (1 + bucket.context)
    return bucket.batch * bucket.query * (TOKEN_WEIGHT + bucket.query + bucket.context)


Number = TypeVar("Number", bound="np.generic[Any]")


def least_of_larger(grid: NDArray[Number]) -> NDArray[Number]:
    """Return, for each corner, the minimum of `grid` over all corners that are not smaller in any dimension."""
    import numpy as np  # imported here: every start reads a plan, and does not need NumPy

    for axis in range(grid.ndim):
        grid = np.flip(np.minimum.accumulate(np.flip(grid, axis), axis), axis)
    return grid
