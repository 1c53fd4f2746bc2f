"""The distance of an engine's next-token distributions from the float32 model's, and its quality class.

KL(p‖q) = Σ p (ln p − ln q) in nats over the vocabulary, p of the float32 reference, q of the engine, after every token
of texts that are given to both (teacher forcing); its mean and 99th percentile over all tokens, and the share of tokens
at which both have the same most probable next one (top-1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import VerificationError

CLASSES = (
    ("float", 1e-4),
    ("8 bits", 0.006),
    ("coarse 8 bits", 0.0125),
    ("4 bits", 0.050),
    ("below 4 bits", float("inf")),
)
"""A class's name and the largest mean KL in it. On SmolLM2-135M, 8 bits in blocks (Q8_0,
onnxruntime-genai's int8) are at 0.005, 8 bits a channel (openvino-genai's int8) at 0.010 to 0.012."""

ROWS = 64
"""Tokens that are compared at a time: a vocabulary of 150,000 in float64 takes 80 MB."""


@dataclass(frozen=True)
class Quality:
    """`mean_kl` and `p99_kl` in nats over `tokens` tokens; `top1` is a share."""

    tokens: int
    mean_kl: float
    p99_kl: float
    top1: float

    @property
    def rank(self) -> int:
        """Place of its class in CLASSES: the smaller the nearer to float32."""
        return next(i for i, (_, most) in enumerate(CLASSES) if self.mean_kl <= most)

    @property
    def class_name(self) -> str:
        """Name of its class."""
        return CLASSES[self.rank][0]


def compare(reference: Path, found: Path, lengths: Sequence[int] = (), first: int = 0) -> Quality:
    """Quality of logits [tokens, V] in a .npy file against the reference's.

    The tokens are of texts of `lengths`, one after the other, and the `first` of each do not count: too little is known
    there. Raises VerificationError for another shape, and for NaN or infinity. Columns beyond the
    reference's vocabulary (padding of some engines) do not count.
    """
    wanted, got = np.load(reference, mmap_mode="r"), np.load(found, mmap_mode="r")
    if got.shape[0] != wanted.shape[0] or got.shape[1] < wanted.shape[1]:
        raise VerificationError(f"logits of shape {got.shape} where the reference has {wanted.shape}")
    divergences, equal = [], []
    for p, q in _rows(wanted, got):
        if not np.isfinite(q).all():
            raise VerificationError("the logits contain NaN or infinity")
        divergences.append((np.exp(p) * (p - q)).sum(-1))
        equal.append(p.argmax(-1) == q.argmax(-1))
    offsets = np.concatenate([np.arange(n) for n in lengths]) if lengths else np.full(len(wanted), first)
    kl, same = (np.concatenate(values)[offsets >= first] for values in (divergences, equal))
    return Quality(len(kl), float(kl.mean()), float(np.percentile(kl, 99)), float(same.mean()))


def _rows(wanted: Any, got: Any) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    for at in range(0, len(wanted), ROWS):
        yield _log_softmax(wanted[at : at + ROWS]), _log_softmax(got[at : at + ROWS, : wanted.shape[1]])


def _log_softmax(logits: Any) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))
