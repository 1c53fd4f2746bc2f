"""Attention in float64, one head and token after the other, and random steps with everything dead poisoned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
LAYER = 1
BEYOND = 16
"""Places of a slot beyond the bucket's context, where it is no ring."""


@dataclass(frozen=True)
class Case:
    """A step's shapes and its model's rule."""

    batch: int
    heads: int
    kv_heads: int
    query: int
    head_dim: int
    context: int
    window: int = -1
    softcap: float = 0.0
    value_dim: int = 0
    """0: that of keys."""
    ring: int = 0
    """Places of the ring; 0: a place a token."""

    @property
    def offsets(self) -> int:
        return self.ring or self.context

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Given:
    """One step's arrays; `slots` −1 is a dummy row. Places without a live token of a row are NaN. `by_token` has the
    cached keys and values of each row by the token's number."""

    query: Floats
    key: Floats
    value: Floats
    keys: Floats
    values: Floats
    by_token: tuple[Floats, Floats]
    slots: NDArray[np.int32]
    past: NDArray[np.int32]


def given(case: Case, past: list[int], dummies: list[bool], seed: int) -> Given:
    """A random step whose rows have so many cached tokens; slots in any order."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(case.batch + 1)[: case.batch].astype(np.int32)
    offsets = case.ring or case.context + BEYOND
    by_token, held = [], []
    for width in (case.head_dim, case.values):
        tokens = rng.normal(size=(case.batch, case.kv_heads, case.context, width)).astype(np.float32)
        lies = np.full((2, case.batch + 1, case.kv_heads, offsets, width), np.nan, np.float32)
        for row in np.flatnonzero(~np.array(dummies)):
            live = np.arange(max(0, past[row] - offsets), past[row])
            lies[LAYER, slots[row]][:, live % offsets] = tokens[row][:, live]
        by_token.append(tokens)
        held.append(lies)
    slots[dummies] = -1
    of_queries = (case.batch, case.heads, case.query, case.head_dim)
    new = (case.batch, case.kv_heads, case.query)
    sizes = (of_queries, (*new, case.head_dim), (*new, case.values))
    query, key, value = (rng.normal(size=size).astype(np.float32) for size in sizes)
    return Given(query, key, value, held[0], held[1], (by_token[0], by_token[1]), slots, np.asarray(past, np.int32))


def reference(case: Case, step: Given) -> Floats:
    """[B, Q, Hq, Dv]; NaN for dummy rows, whose result is nobody's."""
    out = np.full((case.batch, case.query, case.heads, case.values), np.nan)
    for row in np.flatnonzero(step.slots >= 0):
        live, (cached, theirs) = int(step.past[row]), step.by_token
        for head in range(case.heads):
            kv = head // (case.heads // case.kv_heads)
            keys = np.concatenate([cached[row, kv, :live], step.key[row, kv]]).astype(np.float64)
            values = np.concatenate([theirs[row, kv, :live], step.value[row, kv]]).astype(np.float64)
            for token in range(case.query):
                first = max(0, live + token - case.window + 1) if case.window > 0 else 0
                seen = slice(first, live + token + 1)
                scores = keys[seen] @ step.query[row, head, token].astype(np.float64) * case.scale
                if case.softcap:
                    scores = np.tanh(scores / case.softcap) * case.softcap
                weights = np.exp(scores - scores.max())
                out[row, token, head] = weights @ values[seen] / weights.sum()
    return out
