"""Log probabilities of the raw logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmc.runtime.engine.sampling.filters import Logits, Row


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one place, of the raw logits: the chosen token's, its rank (1: the most probable), and the
    most probable tokens', best first, as (id, logprob). Nats."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(values: Logits, token_id: int, count: int) -> TokenLogprobs:
    """Of `token_id` and the `count` most probable ids, by the softmax of logits [V] at temperature 1.

    As vLLM's `raw_logprobs`: before penalties, masks and temperature. The rank is 1 + the number of larger logits; the
    sum is float64. Of equally probable ids the lower go first.
    """
    row = Row(values)
    largest = row.largest
    weights = np.exp(values - largest)
    normaliser = float(largest) + math.log(float(weights.sum(dtype=np.float64)))
    chosen = values[token_id]
    rank = 1 + int(np.count_nonzero(values > chosen))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = row.top(min(count, values.size))
        ids = ids[np.argsort(-values[ids], kind="stable")]
        top = tuple((i, v - normaliser) for i, v in zip(ids.tolist(), values[ids].tolist(), strict=True))
    return TokenLogprobs(token_id, float(chosen) - normaliser, rank, top)
