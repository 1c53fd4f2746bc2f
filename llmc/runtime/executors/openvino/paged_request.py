"""One step of a paged model: its rows end to end, and the request that runs them over a block cache and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmc.runtime.executors.openvino.blocks import BLOCK, BlockCache

if TYPE_CHECKING:
    from llmc.runtime.executors.openvino.states import StateTables

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
_INTERVAL = 1 << 30
"""After so many tokens states would be kept on the way: more than a step has."""
_TYPES = {"f32": ov.Type.f32, "bf16": ov.Type.bf16, "u8": ov.Type.u8}


@dataclass(frozen=True, slots=True)
class StepRows:
    """The model's inputs for one step (compiler/targets/openvino/paged.py names them); T tokens of B rows.

    token_ids, positions [T] int64; past [B], begins [B + 1], blocks, block_begins [B + 1] int32; longest [] int32, the
    tokens of the longest row with its past; slots [B] int32.
    """

    token_ids: Longs
    positions: Longs
    past: Ints
    begins: Ints
    blocks: Ints
    block_begins: Ints
    longest: Ints
    slots: Ints

    @classmethod
    def of(
        cls, token_ids: Longs, past: Longs, new: Longs, tables: Sequence[Sequence[int]], slots: Sequence[int]
    ) -> StepRows:  # fmt: skip
        """From padded token_ids [B, Q] of which row i has new[i] live ones, and each row's block table and slot."""
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
            blocks, block_begins, np.array(total.max(), np.int32), np.array(slots, np.int32),
        )  # fmt: skip

    @classmethod
    def none(cls) -> StepRows:
        """No rows yet."""
        longs, ints, start = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(1, np.int32)
        return cls(longs, longs, ints, start, ints, start, np.array(1, np.int32), ints)

    @property
    def ends(self) -> Longs:
        """The last token of each row."""
        return self.begins[1:].astype(np.int64) - 1

    def filled(self, rows: int, block: int, slot: int) -> tuple[StepRows, Longs]:
        """With one-token rows of no slot up to `rows`, in `block`, states from `slot` on; and each row's last token."""
        more = rows - len(self.past)
        if not more:
            return self, self.ends
        longs, ints = np.zeros(more, np.int64), np.zeros(more, np.int32)
        ones = np.arange(1, more + 1, dtype=np.int32)
        made = StepRows(
            np.append(self.token_ids, longs), np.append(self.positions, longs), np.append(self.past, ints),
            np.append(self.begins, self.begins[-1] + ones), np.append(self.blocks, ints + np.int32(block)),
            np.append(self.block_begins, self.block_begins[-1] + ones), self.longest,
            np.append(self.slots, np.int32(slot - 1) + ones),
        )  # fmt: skip
        return made, made.ends

    @property
    def block_tables(self) -> Ints:
        """[B, M], the blocks of each row, and others behind them."""
        counts = np.diff(self.block_begins)
        tables = np.zeros((len(counts), int(counts.max())), np.int32)
        tables[np.arange(tables.shape[1]) < counts[:, None]] = self.blocks
        return tables


class PagedRequest:
    """An infer request whose caches, by `names`, are a BlockCache, and states in tables, if the model has any."""

    def __init__(
        self, compiled: ov.CompiledModel, names: Sequence[str], cache: BlockCache, states: StateTables | None = None
    ) -> None:
        self._request = compiled.create_infer_request()
        self._cache = cache
        self._states = states
        self._inputs = {port.any_name for port in compiled.inputs}
        self._outputs = [port.any_name for port in compiled.outputs if port.any_name.startswith("new_")]
        for name, array in zip(names, cache.tensors, strict=True):
            shape = list(array.shape)
            if cache.precision != "u8":
                shape[-1] //= _TYPES[cache.precision].size
            self._request.set_tensor(name, ov.Tensor(array, ov.Shape(shape), _TYPES[cache.precision]))
        for name in self._inputs:
            _, _, number = name.partition("_state.")
            if number and states is not None:
                self._request.set_tensor(name, ov.Tensor(states.tables[int(number)], shared_memory=True))
        self._given: list[Any] = []

    @property
    def one_length(self) -> bool:
        """Whether all rows of a step have to have one length."""
        return bool(self._outputs)

    def infer(self, rows: StepRows, wanted: Longs, top_k: int) -> tuple[NDArray[np.float32], Any]:
        """Logits [len(wanted), V] of the wanted tokens, and with `top_k` (values, ids) [len(wanted), top_k]."""
        given: dict[str, NDArray[Any]] = {
            "input_ids": rows.token_ids, "position_ids": rows.positions, "past_lens": rows.past,
            "subsequence_begins": rows.begins, "block_indices": rows.blocks,
            "block_indices_begins": rows.block_begins, "max_context_len": rows.longest, "rows": wanted,
        }  # fmt: skip
        if self._states is not None:
            given |= self._of_states(rows, self._states)
        if self.one_length:
            given |= self._of_one_length(rows)
        request = self._request
        for name, array in given.items():
            request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        request.infer()
        self._given = list(given.values())
        for name in self._outputs:
            self._keep(name, rows)
        logits: NDArray[np.float32] = request.get_tensor("logits").data
        if not top_k:
            return logits, None
        return logits, (request.get_tensor("top_values").data, request.get_tensor("top_ids").data)

    def _of_states(self, rows: StepRows, states: StateTables) -> dict[str, NDArray[Any]]:
        """Where states are read and written: a row without a past reads zeros."""
        read = np.where(rows.past > 0, rows.slots, np.int32(states.zeros))
        return {
            "state_rows": np.stack([read, rows.slots], 1).ravel(),
            "state_begins": np.arange(0, 2 * len(read) + 1, 2, dtype=np.int32),
            "state_interval": np.full(len(read), _INTERVAL, np.int32),
        }

    def _of_one_length(self, rows: StepRows) -> dict[str, NDArray[Any]]:
        tables = rows.block_tables
        batch, blocks = tables.shape
        sizes = np.array([batch, len(rows.token_ids) // batch, blocks * BLOCK], np.int32)
        found = {"step_sizes": sizes, "block_tables": tables}
        return {name: array for name, array in found.items() if name in self._inputs}

    def _keep(self, name: str, rows: StepRows) -> None:
        """Write what the model gives in place of writing it itself."""
        made, (what, _, number) = self._request.get_tensor(name).data, name.partition(".")
        if what == "new_state":
            assert self._states is not None
            self._states.tables[int(number)][rows.slots] = made
            return
        places = rows.past[:, None] + np.arange(made.shape[2], dtype=np.int32)
        blocks = np.take_along_axis(rows.block_tables, places // BLOCK, 1)
        at = 2 * int(number) + (what == "new_value")
        self._cache.put(at, blocks, places % BLOCK, made.transpose(0, 2, 1, 3))
