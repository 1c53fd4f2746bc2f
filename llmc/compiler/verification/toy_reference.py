"""The reference of the toy model: its definition (targets/fake.py) token by token, float64, no cache, no padding.

It shares nothing with the fake executor, not even constants, which keeps a mistake there from being repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.checkpoint.base import Checkpoint
from llmc.compiler.verification.probes import LogitReference
from llmc.errors import CheckpointError

_DECAY = -0.9
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class ToyReference(LogitReference):
    """The toy model of a checkpoint. Every call starts from the first token."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._embedding: list[list[float]] = checkpoint.tensor(_EMBEDDING).tolist()
        self._head: NDArray[np.float64] = checkpoint.tensor(_HEAD).astype(np.float64)
        self._positions = int(checkpoint.config["max_position_embeddings"])
        self._window = checkpoint.config.get("sliding_window")

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each of `positions`, [len(positions), V]."""
        states = list(self._states(tokens))
        return np.array([self._head @ states[position] for position in positions], np.float32)

    def continued(self, prompt: Sequence[int], count: int) -> tuple[list[int], NDArray[np.float32]]:
        """The most likely token, `count` times; of equal ones the first."""
        tokens = list(prompt)
        rows = np.empty((count, len(self._head)), np.float32)
        for row in rows:
            *_, state = self._states(tokens)
            logits = self._head @ state
            row[:] = logits
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :], rows

    def _states(self, tokens: Sequence[int]) -> Iterator[list[float]]:
        """State after each token: decay the previous state, add the token."""
        state = [0.0] * len(self._embedding[0])
        for position, token in enumerate(tokens):
            state = [_DECAY * old + new for old, new in zip(state, self._vector(token, position), strict=True)]
            if self._window is not None and position >= self._window:
                left, faded = position - self._window, _DECAY**self._window
                state = [
                    held - faded * gone for held, gone in zip(state, self._vector(tokens[left], left), strict=True)
                ]
            yield state

    def _vector(self, token: int, position: int) -> list[float]:
        scale = 1 + position / self._positions
        return [scale * value for value in self._embedding[token]]


def require_readable(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for another model, and for an unread tensor."""
    if (found := checkpoint.config.get("model_type")) != "toy":
        raise CheckpointError(f"architecture {found!r} is not supported by this device; supported: toy")
    left = [name for name in checkpoint.of_adapter(0).tensor_names() if name not in (_EMBEDDING, _HEAD)]
    if left:
        raise CheckpointError(f"{checkpoint.path}: nothing in the toy model takes the tensors {', '.join(left)}")
