"""One step of a paged model: its rows end to end, and the request that runs them over a block cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmc.runtime.executors.openvino.blocks import BLOCK, BlockCache

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
_TYPES = {"f32": ov.Type.f32, "bf16": ov.Type.bf16, "u8": ov.Type.u8}


@dataclass(frozen=True, slots=True)
class StepRows:
    """The model's inputs for one step (compiler/targets/openvino/paged.py names them); T tokens of B rows.

    token_ids, positions [T] int64; past [B], begins [B + 1], blocks, block_begins [B + 1] int32; longest [] int32, the
    tokens of the longest row with its past.
    """

    token_ids: Longs
    positions: Longs
    past: Ints
    begins: Ints
    blocks: Ints
    block_begins: Ints
    longest: Ints

    @classmethod
    def of(cls, token_ids: Longs, past: Longs, new: Longs, tables: Sequence[Sequence[int]]) -> StepRows:
        """From padded token_ids [B, Q] of which row i has new[i] live ones, and each row's block table."""
        begins = np.zeros(len(new) + 1, np.int32)
        np.cumsum(new, out=begins[1:])
        total = past + new
        if token_ids.shape[1] == 1:
            flat, positions = token_ids.reshape(-1), past
        else:
            flat = token_ids[np.arange(token_ids.shape[1]) < new[:, None]]
            positions = np.arange(begins[-1]) + np.repeat(past - begins[:-1], new)
        counts = -(-total // BLOCK)
        block_begins = np.zeros(len(new) + 1, np.int32)
        np.cumsum(counts, out=block_begins[1:])
        blocks = np.concatenate([np.array(t[:n], np.int32) for t, n in zip(tables, counts.tolist(), strict=True)])
        return cls(
            np.ascontiguousarray(flat), np.ascontiguousarray(positions, np.int64), past.astype(np.int32), begins,
            blocks, block_begins, np.array(total.max(), np.int32),
        )  # fmt: skip

    @classmethod
    def idle(cls, rows: int, block: int) -> tuple[StepRows, Longs]:
        """One-token rows of no slot, in `block`, and the last token of each."""
        longs, ints = np.zeros(0, np.int64), np.zeros(0, np.int32)
        start = np.zeros(1, np.int32)
        return cls(longs, longs, ints, start, ints, start, np.array(1, np.int32)).filled(rows, block)

    @property
    def ends(self) -> Longs:
        """The last token of each row."""
        return self.begins[1:].astype(np.int64) - 1

    def filled(self, rows: int, block: int) -> tuple[StepRows, Longs]:
        """With one-token rows of no slot, in `block`, up to `rows`; and the last token of each row."""
        more = rows - len(self.past)
        if not more:
            return self, self.ends
        longs, ints = np.zeros(more, np.int64), np.zeros(more, np.int32)
        ones = np.arange(1, more + 1, dtype=np.int32)
        made = StepRows(
            np.append(self.token_ids, longs), np.append(self.positions, longs), np.append(self.past, ints),
            np.append(self.begins, self.begins[-1] + ones), np.append(self.blocks, ints + np.int32(block)),
            np.append(self.block_begins, self.block_begins[-1] + ones), self.longest,
        )  # fmt: skip
        return made, made.ends


class PagedRequest:
    """An infer request whose caches are a BlockCache."""

    def __init__(self, compiled: ov.CompiledModel, cache: BlockCache) -> None:
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        for i, array in enumerate(cache.tensors):
            name = f"{('key', 'value')[i % 2]}_cache.{i // 2}"
            shape = list(array.shape)
            if cache.precision != "u8":
                shape[-1] //= _TYPES[cache.precision].size
            self._request.set_tensor(name, ov.Tensor(array, ov.Shape(shape), _TYPES[cache.precision]))
        self._cache = cache
        self._given: list[Any] = []

    def infer(self, rows: StepRows, wanted: Longs, top_k: int) -> tuple[NDArray[np.float32], Any]:
        """Logits [len(wanted), V] of the wanted tokens, and with `top_k` (values, ids) [len(wanted), top_k]."""
        given = (
            ("input_ids", rows.token_ids), ("position_ids", rows.positions), ("past_lens", rows.past),
            ("subsequence_begins", rows.begins), ("block_indices", rows.blocks),
            ("block_indices_begins", rows.block_begins), ("max_context_len", rows.longest), ("rows", wanted),
        )  # fmt: skip
        request = self._request
        for name, array in given:
            request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        request.infer()
        self._given = [array for _, array in given]
        logits: NDArray[np.float32] = request.get_tensor("logits").data
        if not top_k:
            return logits, None
        return logits, (request.get_tensor("top_values").data, request.get_tensor("top_ids").data)
