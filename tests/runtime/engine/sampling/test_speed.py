"""Sampling is a small part of a step: generous limits that only a change of algorithm can break."""

from __future__ import annotations

import pytest

from llmc.runtime.engine.sampling.batch import sample
from tests.runtime.engine.sampling.reference import logits, sampler
from tests.timing import least_cpu_seconds


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        ({"temperature": 0}, 4e-4),
        ({"temperature": 0.8, "top_k": 50}, 4e-3),
        ({"temperature": 0.8, "top_p": 0.95}, 1e-2),
        ({"temperature": 0, "logprobs": 5}, 1e-2),
        ({"temperature": 0, "repetition_penalty": 1.1}, 2e-3),
    ],
)
def test_a_batch_of_8_is_fast(params, limit):
    """Measured 0.04 ms greedy, 0.4 top_k, 0.9 top_p, 0.9 logprobs, 0.2 penalties."""
    rows = logits(8, 49152)
    rows[:, :200] += 8
    batch = [sampler(vocab=49152, seed=1, max_tokens=None, **params) for _ in range(8)]
    assert least_cpu_seconds(lambda: sample(rows, batch), rounds=30) < limit
