"""Sampling as the definitions say it: float64, whole rows sorted, one token at a time. Slow and plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.sampling.sampler import SequenceSampler

VOCAB = 1000


def logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> Any:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def sampler(
    vocab: int = VOCAB, prompt: Sequence[int] = (), end: Sequence[int] = (), constraint: Any = None,
    bad: Sequence[Sequence[int]] = (), **params: Any,
) -> SequenceSampler:  # fmt: skip
    return SequenceSampler(SamplingParams(**params), vocab, prompt, end, constraint, bad_words=bad)


def penalised(
    row: Any, prompt: Sequence[int], output: Sequence[int], repetition: float = 1.0, presence: float = 0.0,
    frequency: float = 0.0, bias: dict[int, float] | None = None,
) -> Any:  # fmt: skip
    row = row.astype(np.float64)
    for index, value in (bias or {}).items():
        row[index] += value
    for index in set(prompt) | set(output):
        row[index] = row[index] / repetition if row[index] > 0 else row[index] * repetition
    for index in set(output):
        row[index] -= presence + frequency * list(output).count(index)
    return row


def support(row: Any, params: SamplingParams) -> tuple[Any, Any, float]:
    """Ids that may be drawn and their probabilities, in no particular order.

    The third value is how near a filter came to keeping one token more or less, relative to what it compares.
    """
    order = np.lexsort((np.arange(row.size), -row.astype(np.float64)))
    z = row.astype(np.float64)[order] / params.temperature
    p, margin = np.exp(z - z[0]), 1.0
    if 0 < params.top_k < row.size:
        order, p = order[: params.top_k], p[: params.top_k]
    if params.min_p:
        margin = min(margin, float(np.abs(p / params.min_p - 1).min()))
        order, p = order[p >= params.min_p], p[p >= params.min_p]
    if params.top_p < 1:
        cumulative = np.cumsum(p / p.sum())
        margin = min(margin, float(np.abs(cumulative - params.top_p).min()))
        count = int(np.searchsorted(cumulative, params.top_p)) + 1
        order, p = order[:count], p[:count]
    if params.typical_p < 1:
        p = p / p.sum()
        order, p = order[p > 0], p[p > 0]
        distance = np.abs(-np.log(p) + (p * np.log(p)).sum())
        nearest = np.lexsort((order, distance))
        order, p, distance = order[nearest], p[nearest], distance[nearest]
        cumulative = np.cumsum(p)
        margin = min(margin, float(np.abs(cumulative - params.typical_p).min()))
        count = int(np.searchsorted(cumulative, params.typical_p)) + 1
        if count < p.size:
            margin = min(margin, float(distance[count] - distance[count - 1]))
        order, p = order[:count], p[:count]
    return order, p / p.sum(), margin
