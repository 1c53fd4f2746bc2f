"""A request that runs the steps of a paged model over its cache in blocks, and its states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmc.runtime.executors.openvino.blocks import BLOCK, of_ring
from llmc.runtime.step import ADAPTERS

if TYPE_CHECKING:
    from llmc.runtime.executors.openvino.paged_cache import PagedCache
    from llmc.runtime.executors.openvino.paged_rows import Longs, RowBlocks, StepRows
    from llmc.runtime.executors.openvino.states import StateTables

_INTERVAL = 1 << 30
"""After so many tokens states would be kept on the way: more than a step has."""
_TYPES = {"f32": ov.Type.f32, "bf16": ov.Type.bf16, "u8": ov.Type.u8}


class PagedRequest:
    """An infer request over a PagedCache, and states in tables, if the model has any."""

    def __init__(self, compiled: ov.CompiledModel, cache: PagedCache, states: StateTables | None = None) -> None:
        self._request = compiled.create_infer_request()
        self._pools = cache.pools
        self._states = states
        self._inputs = {port.any_name for port in compiled.inputs}
        self._outputs = [port.any_name for port in compiled.outputs if port.any_name.startswith("new_")]
        for pool in self._pools:
            for name, array in zip(pool.names, pool.cache.tensors, strict=True):
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
            "input_ids": rows.token_ids, "position_ids": rows.positions, "subsequence_begins": rows.begins,
            "rows": wanted,
        }  # fmt: skip
        if ADAPTERS in self._inputs:
            given[ADAPTERS] = rows.token_adapters
        for pool, there in zip(self._pools, rows.pools, strict=True):
            given |= self._of_pool(pool.ring, there, len(rows.token_ids))
        if self._states is not None:
            given |= self._of_states(rows, self._states)
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

    def _of_pool(self, ring: int | None, rows: RowBlocks, tokens: int) -> dict[str, NDArray[Any]]:
        """Where rows are in a pool, as far as the model asks; `tokens`: of the step."""
        found: dict[str, NDArray[Any]] = {
            "past_lens": rows.past, "block_indices": rows.blocks, "block_indices_begins": rows.begins,
            "max_context_len": rows.longest,
        }  # fmt: skip
        if self.one_length:
            tables = rows.tables
            batch, blocks = tables.shape
            found["block_tables"] = tables
            found["step_sizes"] = np.array([batch, tokens // batch, blocks * BLOCK], np.int32)
        named = {of_ring(name, ring): array for name, array in found.items()}
        return {name: array for name, array in named.items() if name in self._inputs}

    def _keep(self, name: str, rows: StepRows) -> None:
        """Write what the model gives in place of writing it itself."""
        made, (what, _, number) = self._request.get_tensor(name).data, name.partition(".")
        if what == "new_state":
            assert self._states is not None
            self._states.tables[int(number)][rows.slots] = made
            return
        held = f"{what.removeprefix('new_')}_cache.{number}"
        pool, there = next((p, r) for p, r in zip(self._pools, rows.pools, strict=True) if held in p.names)
        places = there.past[:, None] + np.arange(made.shape[2], dtype=np.int32)
        blocks = np.take_along_axis(there.tables, places // BLOCK, 1)
        pool.cache.put(pool.names.index(held), blocks, places % BLOCK, made.transpose(0, 2, 1, 3))
