"""One step as the executor sees it, and the functions that create it from live rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket, Phase

PAD_TOKEN = 0
ADAPTERS = "adapters"
"""Graph input that selects each token's adapter, if the bundle has adapters."""


@dataclass(frozen=True, slots=True)
class Step:
    """A padded step. Row i < len(slots) is live and belongs to cache slot `slots[i]`; the rest are dummy rows.

    token_ids [B, Q] int64, right padded; past_lengths [B] int64, tokens of the row already in the cache; new_lengths
    [B] int64, live tokens of the row in this step (1 … Q). A dummy row is a valid one-token row at past 0, because
    kernels reject empty rows. `context` is the bucket's cache length in tokens. `packed`: the executor computes only
    live tokens, so padding in token_ids costs nothing. `decode_rows`: the number of leading rows that decode if the
    phase is "prompt". `adapters`: the adapter of each leading row, 0 for none; further rows have none.
    """

    phase: Phase
    context: int
    slots: tuple[int, ...]
    token_ids: NDArray[np.int64]
    past_lengths: NDArray[np.int64]
    new_lengths: NDArray[np.int64]
    packed: bool = False
    adapters: tuple[int, ...] = ()
    decode_rows: int = 0

    @property
    def batch(self) -> int:
        """Number of rows, including dummy rows."""
        return len(self.token_ids)

    @property
    def query(self) -> int:
        """New tokens per row, including padding."""
        return int(self.token_ids.shape[1])

    @property
    def row_adapters(self) -> NDArray[np.int64]:
        """The adapter of each row, [B]."""
        rows = np.zeros(self.batch, np.int64)
        rows[: len(self.adapters)] = self.adapters
        return rows

    @property
    def live_tokens(self) -> int:
        """New tokens that belong to requests."""
        return int(self.new_lengths[: len(self.slots)].sum())

    @property
    def decode_tokens(self) -> int:
        """New tokens of decode rows, which come first."""
        rows = len(self.slots) if self.phase == "decode" else self.decode_rows
        return int(self.new_lengths[:rows].sum())

    @property
    def padding_tokens(self) -> int:
        """Computed padding tokens."""
        return 0 if self.packed else self.token_ids.size - self.live_tokens


def pad(bucket: Bucket, slots: Sequence[int], tokens: Sequence[Sequence[int]], past: Sequence[int]) -> Step:
    """Pad live rows up to `bucket`, which must cover them."""
    token_ids = np.full((bucket.batch, bucket.query), PAD_TOKEN, np.int64)
    past_lengths = np.zeros(bucket.batch, np.int64)
    new_lengths = np.ones(bucket.batch, np.int64)
    for row, ids in enumerate(tokens):
        token_ids[row, : len(ids)] = ids
        past_lengths[row] = past[row]
        new_lengths[row] = len(ids)
    return Step(bucket.phase, bucket.context, tuple(slots), token_ids, past_lengths, new_lengths)


def exact(phase: Phase, slots: Sequence[int], tokens: Sequence[Sequence[int]], past: Sequence[int]) -> Step:
    """Create a step without padding, for an executor that runs any shape. All rows have the same number of tokens."""
    token_ids = np.array(tokens, np.int64)
    past_lengths = np.array(past, np.int64)
    new_lengths = np.full(len(token_ids), token_ids.shape[1], np.int64)
    return Step(phase, int(past_lengths.max()), tuple(slots), token_ids, past_lengths, new_lengths)


def ragged(
    phase: Phase, slots: Sequence[int], tokens: Sequence[Sequence[int]], past: Sequence[int], decode_rows: int = 0
) -> Step:
    """Create a step for an executor that takes rows of any lengths, prefill and decode mixed.

    `phase` is "prompt" if any row is a prompt; its first `decode_rows` rows decode. `context` is the longest past.
    """
    lengths = [len(ids) for ids in tokens]
    longest = max(lengths)
    if longest == min(lengths):
        token_ids = np.array(tokens, np.int64)
    else:
        token_ids = np.full((len(tokens), longest), PAD_TOKEN, np.int64)
        for row, ids in enumerate(tokens):
            token_ids[row, : lengths[row]] = ids
    new_lengths = np.array(lengths, np.int64)
    past_lengths = np.array(past, np.int64)
    return Step(
        phase, max(past), tuple(slots), token_ids, past_lengths, new_lengths, packed=True, decode_rows=decode_rows
    )


StepPart: TypeAlias = "tuple[Step, NDArray[np.int64]]"
"""A step over some live rows of another step, and those rows' indices."""


def rows_apart(step: Step) -> Iterator[StepPart]:
    """Yield each live row of a step as its own step."""
    for row in range(len(step.slots)):
        yield _of_rows(step, np.array([row])), np.array([row])


def in_pieces(step: Step, most: int) -> Iterator[StepPart]:
    """Split a step into steps of at most `most` new tokens per live row."""
    new = step.new_lengths[: len(step.slots)]
    for first in range(0, int(new.max()), most):
        rows = np.flatnonzero(new > first)
        part = _of_rows(step, rows)
        yield replace(
            part, token_ids=part.token_ids[:, first : first + most], past_lengths=part.past_lengths + first,
            new_lengths=np.minimum(part.new_lengths - first, most),
        ), rows  # fmt: skip


def _of_rows(step: Step, rows: NDArray[np.int64]) -> Step:
    slots = tuple(step.slots[row] for row in rows)
    ids, past, new = (array[rows] for array in (step.token_ids, step.past_lengths, step.new_lengths))
    adapters = tuple(step.adapters[row] for row in rows if row < len(step.adapters))
    return replace(
        step, slots=slots, token_ids=ids, past_lengths=past, new_lengths=new, adapters=adapters,
        decode_rows=int((rows < step.decode_rows).sum()),
    )  # fmt: skip
