"""How close to the reference a bundle must be, by quantisation and dtype."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a bundle must reach: mean KL divergence to the reference in nats, and share of equal argmax tokens.

    `bucket_kl` bounds the mean of each bucket by itself, so that one wrong graph cannot hide among many right ones.
    With `greedy_equal`, greedy continuations must be the reference's token by token.
    """

    mean_kl: float
    top1: float
    greedy_equal: bool
    bucket_kl: float = 1.0


_EXACT = Limits(1e-5, 1.0, True, 1e-5)
_CLOSE = Limits(0.02, 0.85, False)


def limits(quantize: str, dtype: str) -> Limits:
    """float32 must be equal; int8 and 16-bit formats must be close (int8 elsewhere: mean KL 0.005 to 0.01)."""
    return _EXACT if (quantize, dtype) == ("none", "f32") else _CLOSE
