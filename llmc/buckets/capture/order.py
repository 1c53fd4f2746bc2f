"""Bucket order for warm-up and graph capture.

The keys of both strategies and the tie order follow HabanaAI's vLLM fork and produce the guide's log lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmc.buckets.bucket import PHASES, Bucket

Key = Callable[[Bucket], tuple[float, ...]]


def length(bucket: Bucket) -> int:
    """Return the guide's sequence length: new tokens of a prompt bucket, cached tokens of a decode bucket."""
    return bucket.query if bucket.phase == "prompt" else bucket.context


def min_tokens(bucket: Bucket) -> tuple[float, ...]:
    """Sort by tokens (batch · sequence length), fewest first; ties by shorter sequences."""
    return bucket.batch * length(bucket), length(bucket), bucket.batch, bucket.context


def max_bs(bucket: Bucket) -> tuple[float, ...]:
    """Sort by batch, largest first; ties by shorter sequences."""
    return -bucket.batch, length(bucket), bucket.context


STRATEGIES: Mapping[str, Key] = {"min_tokens": min_tokens, "max_bs": max_bs}
"""Orders of capture by name: ascending by this key."""


def warm_up_order(buckets: Sequence[Bucket], steps: Mapping[Bucket, int] | None = None) -> list[Bucket]:
    """Return the warm-up order: prompt buckets, then decode buckets, largest first.

    Large buckets allocate first, so smaller ones reuse their freed memory, and a device that is too small fails at
    once. `steps` counts the traffic's steps per bucket. With it, the most used buckets of both phases come first, by
    their share of the phase's steps, so that a server that starts early serves common requests first. Unused buckets
    come last, largest first.
    """
    largest = [b for phase in PHASES for b in sorted(_of(buckets, phase), key=min_tokens, reverse=True)]
    if steps is None:
        return largest
    totals = {phase: max(1, sum(steps.get(b, 0) for b in _of(largest, phase))) for phase in PHASES}
    return sorted(largest, key=lambda b: -steps.get(b, 0) / totals[b.phase])


def _of(buckets: Sequence[Bucket], phase: str) -> list[Bucket]:
    return [bucket for bucket in buckets if bucket.phase == phase]
