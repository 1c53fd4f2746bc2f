"""One open model of one shape, and the buffers that it reads and writes.

Inputs and outputs as targets/openvino/static.py states them; buffers are bound once and shared with OpenVINO, so that
a step copies its tokens and lengths only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmc.runtime.step import Step
from llmc.runtime.top_logits import TopLogits

Array = NDArray[np.float32]
_STEP = ("token_ids", "past_lengths", "new_lengths")


class StaticRequest:
    """A compiled model of `batch` rows, `query` new tokens and a cache of `context` tokens.

    `sizes` are tensors (keys and values of all layers), heads and head_dim. Raises ValueError, saying what differs, for
    a model of another shape.
    """

    def __init__(
        self, compiled: ov.CompiledModel, sizes: tuple[int, int, int], batch: int, query: int, context: int, top_k: int
    ) -> None:
        tensors, heads, size = sizes
        self._request = compiled.create_infer_request()
        self._context = context
        self._pasts = [f"past_{'kv'[i % 2]}{i // 2}" for i in range(tensors if context else 0)]
        wanted = {"token_ids": (batch, query), "past_lengths": (batch,), "new_lengths": (batch,)}
        wanted |= dict.fromkeys(self._pasts, (batch, heads, context, size))
        _require(compiled.inputs, wanted, "takes")
        names = [f"new_{'kv'[i % 2]}{i // 2}" for i in range(tensors)]
        tops = dict.fromkeys(("top_values", "top_ids"), (batch, top_k)) if top_k else {}
        made = {**tops, **dict.fromkeys(names, (batch, heads, query, size))}
        _require([o for o in compiled.outputs if o.any_name != "logits"], made, "returns")
        self.new: Array = np.zeros((tensors, batch, heads, query, size), np.float32)
        """What the last step adds to the cache, [tensors, batch, heads, query, head_dim]."""
        for name, tensor in zip(names, self.new, strict=True):
            self._request.set_tensor(name, ov.Tensor(tensor, shared_memory=True))
        self._given = {name: np.zeros(wanted[name], np.int32) for name in _STEP}
        for name, array in self._given.items():
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        self._top = bool(top_k)
        self._bound: tuple[Any, ...] = ()

    def infer(self, step: Step, past: Array | None) -> tuple[Array, TopLogits | None]:
        """Logits [B, V] and, where the model returns them, the largest; both in the request's memory.

        `past` is [tensors, rows ≥ B, heads, context, head_dim]; None for a model without a cache.
        """
        for name in _STEP:
            self._given[name][...] = getattr(step, name)
        if past is not None:
            self._bind(past[:, : step.batch])
        self._request.infer()
        logits: Array = self._request.get_tensor("logits").data
        if not self._top:
            return logits, None
        values, ids = (self._request.get_tensor(name).data for name in ("top_values", "top_ids"))
        return logits, TopLogits(values, ids.astype(np.int64))

    def _bind(self, past: Array) -> None:
        """Let the cache's inputs be `past`; nothing to do while it lies where it lay."""
        place = (past.ctypes.data, past.shape, past.strides)
        if place != self._bound:
            for name, tensor in zip(self._pasts, past, strict=True):
                self._request.set_tensor(name, ov.Tensor(tensor, shared_memory=True))
            self._bound = place


def _require(ports: Any, wanted: dict[str, tuple[int, ...]], does: str) -> None:
    found = {port.any_name: tuple(port.shape) for port in ports}
    if found != wanted:
        name = next(n for n in (*wanted, *found) if found.get(n) != wanted.get(n))
        raise ValueError(f"it {does} {name} {found.get(name, 'not at all')}, not {wanted.get(name, 'not at all')}")
