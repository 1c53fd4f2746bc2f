"""The cost of running a bucket, in a unit that needs no device: the work of its padded shape.

Prefill is bound by arithmetic. A token of a transformer passes the linear layers once (24·h² operations a layer,
hidden size h) and attends to every key (4·h operations a layer and key), so one token's linear layers weigh as much as
6·h keys. `TOKEN_WEIGHT` is that for h ≈ 700, near the smallest models served: a larger h makes context still cheaper
against tokens, and the order of the choices below changes little.

Decode is bound by reading memory. The weights are read once whatever the bucket, which no choice changes; what
padding adds is the cache of every row, read up to the bucket's context.

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
"""Cost of starting one more prompt step: reading the weights and launching, worth about 1024 tokens of computing."""

DECODE_STEP_WEIGHT = 1 << 17
"""Cost of one more decode step, in cached tokens read: the weights of an 8B model in bf16 (16 GB) against its 128 KiB
of cache a token."""


def cost(bucket: Bucket) -> int:
    """Padded work of one run, strictly increasing in each of batch, query and context, which lookup relies on.

    Prompt: keys attended, batch · query · (TOKEN_WEIGHT + query + context). Decode: tokens of the cache read,
    batch · (1 + context).
    """
    if bucket.phase == "decode":
        return bucket.batch * (1 + bucket.context)
    return bucket.batch * bucket.query * (TOKEN_WEIGHT + bucket.query + bucket.context)


Number = TypeVar("Number", bound="np.generic[Any]")


def least_of_larger(grid: NDArray[Number]) -> NDArray[Number]:
    """For each corner, the least of `grid` over the corners that are nowhere smaller, its own too; any dimensions."""
    import numpy as np  # imported here, because every start reads a plan and does not need it

    for axis in range(grid.ndim):
        grid = np.flip(np.minimum.accumulate(np.flip(grid, axis), axis), axis)
    return grid
