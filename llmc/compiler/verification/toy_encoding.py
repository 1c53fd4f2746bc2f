"""The reference of the toy that embeds or scores: its definition (targets/fake_encoder.py) token by token.

It shares nothing with the fake encoder, not even constants, so that a mistake there is not repeated here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.verification.encoding import Reference

_DECAY = -0.9


def toy_encoder(checkpoint: Checkpoint, task: str) -> Reference:
    """(ids [T], segments [T]) → states [T, H], or logits [labels] to score."""
    embedding = checkpoint.tensor("model.embed_tokens.weight").astype(np.float64)
    head = checkpoint.tensor("lm_head.weight").astype(np.float64)
    positions = int(checkpoint.config["max_position_embeddings"])
    labels = int(checkpoint.config.get("num_labels", 2))

    def run(ids: NDArray[np.int64], types: NDArray[np.int64]) -> NDArray[np.float32]:
        vectors = [(1 + at / positions) * embedding[token] for at, token in enumerate(ids)]
        before, after = _faded(vectors), _faded(vectors[::-1])[::-1]
        states = np.array([b + a - v for b, a, v in zip(before, after, vectors, strict=True)])
        found = states if task == "embed" else head[:labels] @ states[0]
        return found.astype(np.float32)

    return run


def _faded(vectors: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Of each vector, the sum of it and what came before it, faded by the distance."""
    found: list[NDArray[np.float64]] = []
    for vector in vectors:
        found.append(vector + _DECAY * found[-1] if found else vector)
    return found
