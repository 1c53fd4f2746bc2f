"""What running a bucket costs, in one unit that needs no device: the attended work of its padded shape.

A token of a transformer passes the linear layers once (24·h² operations a layer, hidden size h) and attends
to every key (4·h operations a layer and key), so one token's linear layers weigh as much as 6·h keys.
`TOKEN_WEIGHT` is that for h ≈ 700, near the smallest models served: a larger h makes context still cheaper
against tokens, and the order of the choices below changes little.
"""

from __future__ import annotations

from llmc.buckets.bucket import Bucket

TOKEN_WEIGHT = 4096
"""Keys whose attention costs as much as one token's linear layers."""

STEP_WEIGHT = 1024 * TOKEN_WEIGHT
"""Cost of starting one more step: reading the weights and launching, worth about 1024 tokens of computing."""


def cost(bucket: Bucket) -> int:
    """Padded work of one run, in keys attended: batch · query · (TOKEN_WEIGHT + query + context).

    Strictly increasing in each of batch, query and context, which lookup relies on.
    """
    return bucket.batch * bucket.query * (TOKEN_WEIGHT + bucket.query + bucket.context)
