"""One open model of one shape, and the buffers that it reads and writes.

Inputs and outputs as targets/openvino/static.py states them; buffers are bound once and shared with OpenVINO, so that
a step copies its tokens and lengths only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmc.runtime.executors.slot_tensors import Tensors, parts_of
from llmc.runtime.step import Step
from llmc.runtime.top_logits import TopLogits

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape

Array = NDArray[np.float32]
_STEP = ("token_ids", "past_lengths", "new_lengths")


class StaticRequest:
    """A compiled model of `batch` rows, `query` new tokens and a cache of `context` tokens.

    It takes states where it has a context, or with `states`. Raises ValueError, saying what differs, for a model of
    another shape.
    """

    def __init__(
        self, compiled: ov.CompiledModel, shape: CacheShape, batch: int, query: int, context: int, states: bool,
        top_k: int,
    ) -> None:  # fmt: skip
        self._request = compiled.create_infer_request()
        self._kv = [f"past_{t.entry}" for t in shape.kv] if context else []
        self._states = [f"past_{t.entry}" for t in shape.states] if context or states else []
        taken = {f"past_{t.entry}": t.size(batch, context) for t in shape}
        wanted = {"token_ids": (batch, query), "past_lengths": (batch,), "new_lengths": (batch,)}
        wanted |= {name: taken[name] for name in (*self._kv, *self._states)}
        _require(compiled.inputs, wanted, "takes")
        tops = dict.fromkeys(("top_values", "top_ids"), (batch, top_k)) if top_k else {}
        made = {**tops, **{f"new_{t.entry}": t.size(batch, query) for t in shape.without_rings}}
        _require([o for o in compiled.outputs if o.any_name != "logits"], made, "returns")
        new = Tensors([part.unrolled for part in parts_of(shape)], batch * query)
        new.reserve(batch, query)
        self.new: list[Array] = new.arrays
        """What the last step adds to the cache: its parts (slot_tensors.py), [tensors, batch, heads, query, width]."""
        self.new_states: list[Array] = [np.zeros(t.size(batch, 0), np.float32) for t in shape.states]
        """States after the last step, [batch, …]."""
        for held, arrays in ((shape.kv, new.rows(0, batch)), (shape.states, self.new_states)):
            for t, array in zip(held, arrays, strict=True):
                self._request.set_tensor(f"new_{t.entry}", ov.Tensor(array, shared_memory=True))
        self._given = {name: np.zeros(wanted[name], np.int32) for name in _STEP}
        for name, given in self._given.items():
            self._request.set_tensor(name, ov.Tensor(given, shared_memory=True))
        self._top = bool(top_k)
        self._bound: tuple[Any, ...] = ()

    def infer(self, step: Step, past: Tensors | None, states: Sequence[Array]) -> tuple[Array, TopLogits | None]:
        """Logits [B, V] and, where the model returns them, the largest; both in the request's memory.

        `past` has rows of the model's context, at least as many as its batch; None for a model without a context.
        `states` are [≥ B, …].
        """
        for name in _STEP:
            self._given[name][...] = getattr(step, name)
        rows = [] if past is None else past.rows(0, step.batch)
        self._bind([*self._kv, *self._states], [*rows, *(state[: step.batch] for state in states)])
        self._request.infer()
        logits: Array = self._request.get_tensor("logits").data
        if not self._top:
            return logits, None
        values, ids = (self._request.get_tensor(name).data for name in ("top_values", "top_ids"))
        return logits, TopLogits(values, ids.astype(np.int64))

    def _bind(self, names: Sequence[str], arrays: Sequence[Array]) -> None:
        """Let the cache's inputs be `arrays`; nothing to do while they lie where they lay."""
        place = tuple((array.ctypes.data, array.shape) for array in arrays[: len(names)])
        if place != self._bound:
            for name, array in zip(names, arrays, strict=False):
                self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
            self._bound = place


def _require(ports: Any, wanted: dict[str, tuple[int, ...]], does: str) -> None:
    found = {port.any_name: tuple(port.shape) for port in ports}
    if found != wanted:
        name = next(n for n in (*wanted, *found) if found.get(n) != wanted.get(n))
        raise ValueError(f"it {does} {name} {found.get(name, 'not at all')}, not {wanted.get(name, 'not at all')}")
