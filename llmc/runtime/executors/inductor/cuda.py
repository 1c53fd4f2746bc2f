"""The only module of this executor that uses torch.cuda.

Names and behaviour: pytorch/pytorch v2.11 to v2.13, torch/cuda/graphs.py, torch/cuda/memory.py (MemPool, use_mem_pool),
aten/src/ATen/cuda/CUDAGraph.cpp and c10/cuda/CUDACachingAllocator.cpp.

All work uses one stream, and all step allocations, captured or not, one memory pool. A graph's addresses are fixed when
it is captured and free for others between its replays, because work of one stream runs in order. Whatever outlives a
step is outside the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmc.errors import DeviceError, OutOfDeviceMemoryError

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


class CudaAccelerator:
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

    def put(self, tensor: Any) -> Any:
        """Copy a host tensor to the GPU. Raises OutOfDeviceMemoryError."""
        with self.guarded():
            return tensor.to(self.device)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new GPU tensor outside the pool. Raises OutOfDeviceMemoryError."""
        with self.guarded():
            return self._torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new pinned host tensor for asynchronous copies."""
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
        """Wait for all submitted work."""
        self._torch.cuda.synchronize(self.device)

    def mark_step(self) -> None:
        """Do nothing: operators are launched when called."""

    def capture(self, run: Callable[[], object]) -> Any:
        """Capture what `run` launches as a graph, without running it; its memory is in the pool.

        `run` must have run before, so that libraries are initialised. The graph reads and writes `run`'s tensors, which
        must outlive it. Raises OutOfDeviceMemoryError, and DeviceError for what cannot be captured; then, and after an
        interrupt, nothing of it remains.
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
