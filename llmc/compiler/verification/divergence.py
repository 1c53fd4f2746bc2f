"""Kullback-Leibler divergence of softmax distributions, and when two tokens are equally good."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TIE = 2e-3
"""Logit margin of the reference's best two below which either is right: float32 sums differ in their last digits."""


def kl_divergence(reference: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """KL(reference ‖ other) in nats, of the softmax of two logit rows [V]."""
    p, q = log_softmax(reference), log_softmax(other)
    return max(0.0, float((np.exp(p) * (p - q)).sum()))


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Log probabilities over the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def tied(reference: NDArray[np.float32], token: int) -> bool:
    """Whether `token` is as good as the best of the reference's logits [V]: their margin is within rounding."""
    return bool(reference.max() - reference[token] < TIE)
