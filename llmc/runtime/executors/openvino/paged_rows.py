"""The rows of one step of a paged model, end to end, and where in a pool of blocks their tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.executors.openvino.blocks import BLOCK

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Inputs that say where the tokens of B rows are in a pool: past [B], tokens of each row that are there, begins
    [B + 1], where each row's begin in `blocks`, all int32; longest [] int32, those of the longest row with its new
    ones."""

    past: Ints
    blocks: Ints
    begins: Ints
    longest: Ints

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]], firsts: Sequence[int], past: Longs, new: Longs) -> RowBlocks:
        """From each row's block table, and the block of its tokens that the table begins with."""
        there = past - np.array(firsts, np.int64) * BLOCK
        total = there + new
        counts = -(-total // BLOCK)
        begins = np.zeros(len(new) + 1, np.int32)
        np.cumsum(counts, out=begins[1:])
        blocks = [np.array(table[:count], np.int32) for table, count in zip(tables, counts.tolist(), strict=True)]
        return cls(there.astype(np.int32), np.concatenate(blocks), begins, np.array(total.max(), np.int32))

    @classmethod
    def none(cls) -> RowBlocks:
        """Of no rows."""
        ints = np.zeros(0, np.int32)
        return cls(ints, ints, np.zeros(1, np.int32), np.array(1, np.int32))

    def filled(self, more: int, block: int) -> RowBlocks:
        """With `more` rows of one token, each in `block`."""
        ints, ones = np.zeros(more, np.int32), np.arange(1, more + 1, dtype=np.int32)
        return RowBlocks(
            np.append(self.past, ints), np.append(self.blocks, ints + np.int32(block)),
            np.append(self.begins, self.begins[-1] + ones), self.longest,
        )  # fmt: skip

    @property
    def tables(self) -> Ints:
        """[B, M], the blocks of each row, and others behind them."""
        counts = np.diff(self.begins)
        tables = np.zeros((len(counts), int(counts.max())), np.int32)
        tables[np.arange(tables.shape[1]) < counts[:, None]] = self.blocks
        return tables


@dataclass(frozen=True, slots=True)
class StepRows:
    """The model's inputs for one step (compiler/targets/openvino/paged.py names them); T tokens of B rows.

    token_ids, positions [T] int64; begins [B + 1] int32, where each row's tokens begin; slots [B] int32; adapters [B]
    int64, of each row; pools: where they are in each pool of the cache, of which the first has all tokens.
    """

    token_ids: Longs
    positions: Longs
    begins: Ints
    slots: Ints
    adapters: Longs
    pools: Sequence[RowBlocks]

    @classmethod
    def of(
        cls, token_ids: Longs, past: Longs, new: Longs, slots: Sequence[int], adapters: Longs,
        pools: Sequence[RowBlocks],
    ) -> StepRows:  # fmt: skip
        """From padded token_ids [B, Q] of which row i has new[i] live ones."""
        begins = np.zeros(len(new) + 1, np.int32)
        np.cumsum(new, out=begins[1:])
        if token_ids.shape[1] == 1:
            flat, positions = token_ids.reshape(-1), past
        else:
            flat = token_ids[np.arange(token_ids.shape[1]) < new[:, None]]
            positions = np.arange(begins[-1]) + np.repeat(past - begins[:-1], new)
        return cls(
            np.ascontiguousarray(flat), np.ascontiguousarray(positions, np.int64), begins, np.array(slots, np.int32),
            adapters, pools,
        )  # fmt: skip

    @classmethod
    def none(cls, pools: int) -> StepRows:
        """No rows yet."""
        longs, ints = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return cls(longs, longs, np.zeros(1, np.int32), ints, longs, [RowBlocks.none()] * pools)

    @property
    def token_adapters(self) -> Longs:
        """The adapter of each token, [T]."""
        return np.repeat(self.adapters, np.diff(self.begins))

    @property
    def past(self) -> Ints:
        """Tokens of each row before the step, [B]."""
        return self.pools[0].past

    @property
    def ends(self) -> Longs:
        """The last token of each row."""
        return self.begins[1:].astype(np.int64) - 1

    def filled(self, rows: int, blocks: Sequence[int], slot: int) -> tuple[StepRows, Longs]:
        """With one-token rows of no slot up to `rows`, in one of `blocks` in each pool, states from `slot` on; and each
        row's last token."""
        more = rows - len(self.past)
        if not more:
            return self, self.ends
        longs, ones = np.zeros(more, np.int64), np.arange(1, more + 1, dtype=np.int32)
        made = StepRows(
            np.append(self.token_ids, longs), np.append(self.positions, longs),
            np.append(self.begins, self.begins[-1] + ones), np.append(self.slots, np.int32(slot - 1) + ones),
            np.append(self.adapters, longs),
            [pool.filled(more, block) for pool, block in zip(self.pools, blocks, strict=True)],
        )  # fmt: skip
        return made, made.ends
