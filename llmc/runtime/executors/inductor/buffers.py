"""A step's inputs and outputs at fixed addresses, which captured graphs require.

One GPU tensor holds the inputs of any bucket's step, as slices of the largest bucket's, as in vLLM
(vllm/v1/worker/gpu_model_runner.py, v0.11: static input buffers, sliced). A step's graph copies its outputs into the
first rows of tensors that all buckets share. The host buffers of both are pinned, so inputs are one copy to the GPU,
and outputs return without another copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmc.runtime.executors.whole_step.step_program import inputs

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.runtime.executors.inductor.cuda import CudaAccelerator
    from llmc.runtime.step import Step

ALIGNED = 32
"""Alignment of inputs, in int64 values: 256 bytes, as torch's allocator aligns tensors."""


class StaticInputs:
    """Buffers for the inputs of any bucket of a plan, on the GPU and pinned on the host.

    `lengths` are those of the cache arrays (step_program.inputs).
    """

    def __init__(self, accelerator: CudaAccelerator, plan: Plan, lengths: Sequence[int]) -> None:
        import torch

        self._lengths = tuple(lengths)
        most = max(self._offsets(b.batch, b.query)[-1] for b in plan.buckets)
        self._there: Any = accelerator.empty((most,), torch.int64)
        self._here: Any = accelerator.pinned((most,), torch.int64)
        self._views: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}

    def put(self, step: Step) -> list[Any]:
        """Start copying the step's inputs (step_program.inputs) to the GPU; later GPU work sees them.

        The host buffer is in use until then: a step waits for its outputs before the next one begins.
        """
        batch, query = step.token_ids.shape
        there, here = self.views(batch, query)
        for index, value in zip(here, inputs(step, self._lengths), strict=True):
            index.copy_(value)
        end = self._offsets(batch, query)[-1]
        self._there.narrow(0, 0, end).copy_(self._here.narrow(0, 0, end), non_blocking=True)
        return there

    def views(self, batch: int, query: int) -> tuple[list[Any], list[Any]]:
        """The GPU and host buffers of a step of [batch, query] tokens."""
        found = self._views.get((batch, query))
        if found is None:
            found = self._cut(self._there, batch, query), self._cut(self._here, batch, query)
            self._views[batch, query] = found
        return found

    def drop(self) -> None:
        """Release the memory."""
        self._views.clear()
        self._there = self._here = None

    def _sizes(self, batch: int, query: int) -> list[int]:
        """Sizes of token_ids, past, new and slots, and of sources and places for each length."""
        return [batch * query, batch, batch, batch, *(batch * query for _ in range(2 * len(self._lengths)))]

    def _offsets(self, batch: int, query: int) -> list[int]:
        """Where each begins, and where the last ends."""
        found = [0]
        for count in self._sizes(batch, query):
            found.append(found[-1] + -(-count // ALIGNED) * ALIGNED)
        return found

    def _cut(self, flat: Any, batch: int, query: int) -> list[Any]:
        begins = self._offsets(batch, query)[:-1]
        token_ids, *others = map(flat.narrow, (0,) * len(begins), begins, self._sizes(batch, query))
        return [token_ids.view(batch, query), *others]


class StaticOutputs:
    """The outputs of the last step: tensors of `rows` rows."""

    def __init__(self, accelerator: CudaAccelerator, rows: int) -> None:
        self._accelerator, self._rows = accelerator, rows
        self._there: list[Any] = []
        self._here: list[Any] = []

    def make(self, like: Sequence[Any]) -> None:
        """Allocate outputs with the shapes (except rows) and dtypes of the first step's. Once is enough."""
        if not self._there:
            shapes = [(self._rows, *tensor.shape[1:]) for tensor in like]
            self._there = [self._accelerator.empty(shape, t.dtype) for shape, t in zip(shapes, like, strict=True)]
            self._here = [self._accelerator.pinned(shape, t.dtype) for shape, t in zip(shapes, like, strict=True)]

    def keep(self, found: Sequence[Any]) -> None:
        """Copy a step's outputs here, on the GPU."""
        for index, tensor in zip(self._there, found, strict=True):
            index.narrow(0, 0, tensor.shape[0]).copy_(tensor)

    def fetch(self, which: Sequence[int], rows: int, batch: int) -> list[Any]:
        """Copy the first `rows` rows of the outputs numbered `which` to the host, each as a tensor of `batch` rows."""
        with self._accelerator.guarded():
            for i in which:
                self._here[i].narrow(0, 0, rows).copy_(self._there[i].narrow(0, 0, rows), non_blocking=True)
        self._accelerator.synchronize()
        return [self._here[i].narrow(0, 0, batch) for i in which]

    def drop(self) -> None:
        """Release the memory."""
        self._there, self._here = [], []
