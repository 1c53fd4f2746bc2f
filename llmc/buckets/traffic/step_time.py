"""Step times of a simulated server.

Only the simulation in `schedule.py` uses them, to estimate the batch sizes at a given arrival rate. The times do not
predict any device, and never decide a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmc.buckets.bucket import Phase
from llmc.buckets.cost.bench import Bench

PARAMETERS = 8e9
"""Weights of the assumed model, 8B parameters, in bf16: 2 bytes each."""

MEMORY_BYTES_PER_SECOND = 2e12
"""Memory bandwidth of the assumed accelerator."""

EFFECTIVE_FLOPS = 2e14
"""Sustained arithmetic in prefill, in operations per second."""

CACHE_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
"""KV cache of a token, 128 KiB: key and value, 32 layers, 8 KV heads of 128 values, 2 bytes each."""


WEIGHTS_SECONDS = 2 * PARAMETERS / MEMORY_BYTES_PER_SECOND
"""Reading all weights once, 16 GB / 2 TB/s = 8 ms: the least that any step takes."""

CACHED_TOKEN_SECONDS = CACHE_BYTES_PER_TOKEN / MEMORY_BYTES_PER_SECOND
"""Reading one token of the cache in a decode step, 128 KiB / 2 TB/s = 0.066 µs."""

NEW_TOKEN_SECONDS = 2 * PARAMETERS / EFFECTIVE_FLOPS
"""Computing one prompt token, 2 operations a weight / 200 TFLOP/s = 0.08 ms; attention is not counted."""


class StepTime(Protocol):
    """Seconds that one step takes, above 0; equal arguments give equal times."""

    def prompt(self, lengths: Sequence[int], cached: Sequence[int]) -> float:
        """Return the time to prefill a group: prompt i has lengths[i] tokens, the first cached[i] in the cache."""
        ...

    def decode(self, batch: int, longest: int, total: int) -> float:
        """Return the time of one decode step of `batch` sequences with `total` cached tokens together, `longest` at
        most.
        """
        ...


class AssumedStepTime:
    """An 8B-parameter bf16 model on one accelerator, as a roofline of the constants above."""

    def prompt(self, lengths: Sequence[int], cached: Sequence[int]) -> float:
        """Return the time to compute the new tokens, at least that of reading the weights."""
        return max(WEIGHTS_SECONDS, (sum(lengths) - sum(cached)) * NEW_TOKEN_SECONDS)

    def decode(self, batch: int, longest: int, total: int) -> float:
        """Return the time to read the weights and the cache of all sequences."""
        return WEIGHTS_SECONDS + total * CACHED_TOKEN_SECONDS


GRAIN = 64
"""Multiple of tokens that lengths are rounded up to before a bench lookup, to save lookups."""


class BenchStepTime:
    """Step times of a bench file; lengths are rounded up to GRAIN tokens."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._known: dict[tuple[Phase, int, int, int], float] = {}

    def prompt(self, lengths: Sequence[int], cached: Sequence[int]) -> float:
        """Return the seconds of a step of these prompts, padded to the longest."""
        new = max(length - past for length, past in zip(lengths, cached, strict=True))
        return self._seconds("prompt", len(lengths), -(-new // GRAIN) * GRAIN, -(-max(cached) // GRAIN) * GRAIN)

    def decode(self, batch: int, longest: int, total: int) -> float:
        """Return the seconds of a decode step; `total` is not needed."""
        return self._seconds("decode", batch, 1, -(-longest // GRAIN) * GRAIN)

    def _seconds(self, phase: Phase, batch: int, query: int, context: int) -> float:
        key = (phase, batch, query, context)
        if key not in self._known:
            self._known[key] = float(self._bench.seconds(*key))
        return self._known[key]
