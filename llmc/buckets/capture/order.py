"""Which bucket comes first: in the warm-up, and in the capture of graphs.

The keys of both strategies and the order of ties are those of HabanaAI's vLLM fork, and give the lines of the guide's
logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmc.buckets.bucket import PHASES, Bucket

Key = Callable[[Bucket], tuple[float, ...]]


def length(bucket: Bucket) -> int:
    """What the guide calls the sequence length: new tokens of a prompt, cached ones of a decode step."""
    return bucket.query if bucket.phase == "prompt" else bucket.context


def min_tokens(bucket: Bucket) -> tuple[float, ...]:
    """Few tokens (batch · sequence length) first, of as many the shorter sequences first."""
    return bucket.batch * length(bucket), length(bucket), bucket.batch, bucket.context


def max_bs(bucket: Bucket) -> tuple[float, ...]:
    """Large batches first, of equal ones the shorter sequences first."""
    return -bucket.batch, length(bucket), bucket.context


STRATEGIES: Mapping[str, Key] = {"min_tokens": min_tokens, "max_bs": max_bs}
"""Orders of capture by name: ascending by this key."""


def warm_up_order(buckets: Sequence[Bucket], steps: Mapping[Bucket, int] | None = None) -> list[Bucket]:
    """The order of the warm-up: prompt buckets, then decode buckets, the largest first.

    The largest allocate first, so what they free serves the smaller ones, and a device too small for the plan is found
    at once. `steps` is how often traffic runs each bucket. With it, the hottest come first, those of both phases by
    their share of the phase's steps, so that a server that starts before all is warm serves the usual request first.
    Buckets that traffic never runs come last, the largest first.
    """
    largest = [b for phase in PHASES for b in sorted(_of(buckets, phase), key=min_tokens, reverse=True)]
    if steps is None:
        return largest
    totals = {phase: max(1, sum(steps.get(b, 0) for b in _of(largest, phase))) for phase in PHASES}
    return sorted(largest, key=lambda b: -steps.get(b, 0) / totals[b.phase])


def _of(buckets: Sequence[Bucket], phase: str) -> list[Bucket]:
    return [bucket for bucket in buckets if bucket.phase == phase]
