"""The reference of the toy model: its definition (targets/fake.py) in plain loops, float64, no cache, no padding.

Nothing is shared with the fake executor, not even constants: a mistake there must not be repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.checkpoint.base import Checkpoint

_DECAY = -0.9


class ToyReference:
    """The toy model of a checkpoint. Every call starts from the first token."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._embedding: list[list[float]] = checkpoint.tensor("model.embed_tokens.weight").tolist()
        self._head: list[list[float]] = checkpoint.tensor("lm_head.weight").tolist()
        self._positions = int(checkpoint.config["max_position_embeddings"])

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each of `positions`, [len(positions), V]."""
        return np.array([self._after(tokens[: position + 1]) for position in positions], np.float32)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely token, `count` times; of equal ones the first."""
        tokens = list(prompt)
        for _ in range(count):
            logits = self._after(tokens)
            tokens.append(logits.index(max(logits)))
        return tokens[len(prompt) :]

    def _after(self, tokens: Sequence[int]) -> list[float]:
        """Logits after the last of `tokens`: fade what was there, add the token, project."""
        state = [0.0] * len(self._embedding[0])
        for position, token in enumerate(tokens):
            scale = 1 + position / self._positions
            state = [_DECAY * old + scale * new for old, new in zip(state, self._embedding[token], strict=True)]
        return [sum(map(mul, row, state)) for row in self._head]
