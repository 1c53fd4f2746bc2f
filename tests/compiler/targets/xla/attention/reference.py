"""Attention in float64, one head and token after the other, and random steps with everything dead poisoned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
LAYER = 1
CAPACITY_BEYOND = 16
"""Tokens that a slot holds beyond the bucket's context."""


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

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Given:
    """One step's arrays; `slots` −1 is a dummy row. Cached tokens beyond a row's live ones are NaN."""

    query: Floats
    key: Floats
    value: Floats
    keys: Floats
    values: Floats
    slots: NDArray[np.int32]
    past: NDArray[np.int32]


def given(case: Case, past: list[int], dummies: list[bool], seed: int) -> Given:
    """A random step whose rows have so many cached tokens; slots in any order."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(case.batch + 1)[: case.batch].astype(np.int32)
    shape = (2, case.batch + 1, case.kv_heads, case.context + CAPACITY_BEYOND)
    keys, values = (rng.normal(size=(*shape, n)).astype(np.float32) for n in (case.head_dim, case.values))
    dead = set(range(case.batch + 1)) - set(slots.tolist())
    for row, (slot, length) in enumerate(zip(slots.tolist(), past, strict=True)):
        keys[:, slot, :, 0 if dummies[row] else length :] = np.nan
        values[:, slot, :, 0 if dummies[row] else length :] = np.nan
    for slot in dead:
        keys[:, slot], values[:, slot] = np.nan, np.nan
    keys[1 - LAYER], values[1 - LAYER] = np.nan, np.nan
    slots[dummies] = -1
    of_queries = (case.batch, case.heads, case.query, case.head_dim)
    new = (case.batch, case.kv_heads, case.query)
    sizes = (of_queries, (*new, case.head_dim), (*new, case.values))
    query, key, value = (rng.normal(size=size).astype(np.float32) for size in sizes)
    return Given(query, key, value, keys, values, slots, np.asarray(past, np.int32))


def reference(case: Case, step: Given) -> Floats:
    """[B, Q, Hq, Dv]; NaN for dummy rows, whose result is nobody's."""
    out = np.full((case.batch, case.query, case.heads, case.values), np.nan)
    for row in np.flatnonzero(step.slots >= 0):
        live, slot = int(step.past[row]), int(step.slots[row])
        for head in range(case.heads):
            kv = head // (case.heads // case.kv_heads)
            keys = np.concatenate([step.keys[LAYER, slot, kv, :live], step.key[row, kv]]).astype(np.float64)
            values = np.concatenate([step.values[LAYER, slot, kv, :live], step.value[row, kv]]).astype(np.float64)
            for token in range(case.query):
                first = max(0, live + token - case.window + 1) if case.window > 0 else 0
                seen = slice(first, live + token + 1)
                scores = keys[seen] @ step.query[row, head, token].astype(np.float64) * case.scale
                if case.softcap:
                    scores = np.tanh(scores / case.softcap) * case.softcap
                weights = np.exp(scores - scores.max())
                out[row, token, head] = weights @ values[seen] / weights.sum()
    return out
