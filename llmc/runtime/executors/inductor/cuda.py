"""The only module of this executor that uses torch.cuda.

Names and behaviour: pytorch/pytorch v2.11 to v2.13, torch/cuda/graphs.py, torch/cuda/memory.py (MemPool, use_mem_pool),
aten/src/ATen/cuda/CUDAGraph.cpp and c10/cuda/CUDACachingAllocator.cpp.

All work uses one stream, and all step allocations, captured or not, one memory pool. A graph's addresses are fixed when
it is captured and free for others between its replays, because work of one stream runs in order. Whatever outlives a
step is outside the pool.

A step's inputs and outputs are at fixed addresses, which captured graphs require. One GPU tensor holds the inputs of
any bucket's step, as slices of the largest bucket's, as in vLLM (vllm/v1/worker/gpu_model_runner.py, v0.11: static
input buffers, sliced). A step's graph copies its outputs into the first rows of tensors that all buckets share. The
host buffers of both are pinned, so inputs are one copy to the GPU, and outputs return without another copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmc.errors import DeviceError, OutOfDeviceMemoryError
from llmc.runtime.executors.whole_step.step import TorchAccelerator, inputs

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.runtime.step import Step

_log = logging.getLogger("llmc")

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Texts in errors of CUDA and its libraries that mean out of memory."""


def is_available() -> bool:
    """Whether this torch can use a GPU here. False if torch was built without CUDA or there is no driver for it."""
    import torch

    return bool(torch.cuda.is_available())


def cuda_version() -> str | None:
    """The CUDA version that this torch was built with, such as "13.0"; None if built without."""
    import torch

    found: str | None = torch.version.cuda
    return found


class CudaAccelerator(TorchAccelerator):
    """This process's current GPU. Raises DeviceError if it cannot be opened."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        try:
            self._index = torch.cuda.current_device()
            self.device = torch.device("cuda", self._index)
            self.name = f"{torch.cuda.get_device_name(self.device)} ({self.device})"
            self._stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.MemPool()
        except RuntimeError as e:
            raise DeviceError(
                f"the NVIDIA GPU cannot be opened: {e}; see `nvidia-smi` for its driver, and whether another process "
                "holds it"
            ) from e

    # memory

    def memory(self) -> tuple[int, int]:
        """Free and total bytes by the driver. torch's cached memory is not free."""
        self.synchronize()
        free, total = self._torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new GPU tensor outside the pool. Raises OutOfDeviceMemoryError."""
        with self.guarded():
            return self._torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def give_back(self) -> None:
        """Return torch's cached free memory to the driver; the pool keeps its own."""
        self.synchronize()
        self._torch.cuda.empty_cache()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run the block on this GPU's stream without gradients, and raise OutOfDeviceMemoryError if memory runs out."""
        try:
            with self._torch.cuda.stream(self._stream), self._torch.inference_mode():
                yield
        except RuntimeError as e:
            if any(words in str(e) for words in _OUT_OF_MEMORY):
                free, total = self._torch.cuda.mem_get_info(self.device)
                raise OutOfDeviceMemoryError(
                    f"{self.name}: {str(e).splitlines()[0]} ({free} of {total} bytes are free)"
                ) from e
            raise

    @contextmanager
    def in_pool(self) -> Iterator[None]:
        """Inside the block, allocations come from the pool, which graphs share. Includes `guarded`."""
        with self.guarded(), self._torch.cuda.use_mem_pool(self._pool, self.device):
            yield

    # execution

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self.device)

    def capture(self, run: Callable[[], object]) -> Any:
        """Capture what `run` launches as a graph, without running it; its memory is in the pool.

        `run` must have run before, so that libraries are initialised, and its tensors must outlive the graph. Raises
        OutOfDeviceMemoryError, and DeviceError for what cannot be captured; then nothing of it remains.
        """
        graph = self._torch.cuda.CUDAGraph()
        with self.guarded():
            self.synchronize()
            # not by torch.cuda.graph: it empties the cache before, which is what uncaptured steps go by, and leaves
            # its stream current where the capture fails
            graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
            try:
                run()
                graph.capture_end()
            except BaseException as e:
                self._abandon(graph)
                full = isinstance(e, RuntimeError) and any(words in str(e) for words in _OUT_OF_MEMORY)
                if isinstance(e, RuntimeError) and not full:
                    raise DeviceError(f"{str(e).splitlines()[0]}") from e
                raise
        return graph

    def _abandon(self, graph: Any) -> None:
        """End a failed capture and notify the pool.

        `capture_end` of a capture that CUDA has invalidated raises before it does so. The next capture would then fail
        ("already recording to mempool_id").
        """
        from torch.cuda import memory

        try:
            graph.capture_end()
        except RuntimeError:
            try:
                memory._cuda_endAllocateToPool(self._index, self._pool.id)
            except RuntimeError:
                pass  # the pool was notified, and `reset` returns the graph's part
            else:
                memory._cuda_releasePool(self._index, self._pool.id)
        graph.reset()

    def close(self) -> None:
        """Release the pool and all cached memory, after graphs were reset."""
        self._pool = None
        self.give_back()


ALIGNED = 32
"""Alignment of inputs, in int64 values: 256 bytes, as torch's allocator aligns tensors."""


class StaticInputs:
    """Inputs of any bucket, on the GPU and pinned on the host. `lengths` are those of the cache arrays."""

    def __init__(self, accelerator: CudaAccelerator, plan: Plan, lengths: Sequence[int]) -> None:
        import torch

        self._lengths = tuple(lengths)
        most = max(self._offsets(b.batch, b.query)[-1] for b in plan.buckets)
        self._there: Any = accelerator.empty((most,), torch.int64)
        self._here: Any = accelerator.pinned((most,), torch.int64)
        self._views: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}

    def put(self, step: Step) -> list[Any]:
        """Start copying a step's inputs to the GPU; the host buffer is in use until its outputs were fetched."""
        batch, query = step.token_ids.shape
        there, here = self.views(batch, query)
        for index, value in zip(here, inputs(step, self._lengths), strict=True):
            index.copy_(value)
        end = self._offsets(batch, query)[-1]
        self._there.narrow(0, 0, end).copy_(self._here.narrow(0, 0, end), non_blocking=True)
        return there

    def views(self, batch: int, query: int) -> tuple[list[Any], list[Any]]:
        found = self._views.get((batch, query))
        if found is None:
            found = self._cut(self._there, batch, query), self._cut(self._here, batch, query)
            self._views[batch, query] = found
        return found

    def drop(self) -> None:
        self._views.clear()
        self._there = self._here = None

    def _sizes(self, batch: int, query: int) -> list[int]:
        return [batch * query, batch, batch, batch, *(batch * query for _ in range(2 * len(self._lengths)))]

    def _offsets(self, batch: int, query: int) -> list[int]:
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
        self._there, self._here = [], []
