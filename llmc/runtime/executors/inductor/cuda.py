"""torch.cuda, reached here and nowhere else in this executor.

Names and behaviour: pytorch/pytorch v2.11 to v2.13, torch/cuda/graphs.py, torch/cuda/memory.py (MemPool,
use_mem_pool), aten/src/ATen/cuda/CUDAGraph.cpp and c10/cuda/CUDACachingAllocator.cpp.

All work goes to one stream, and all that steps allocate into one memory pool, captured or not: a graph's addresses are
fixed when it is captured, and are free for others between its replays, because work of one stream runs in order. What
has to outlive a step is not in the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmc.errors import DeviceError, OutOfDeviceMemoryError

_log = logging.getLogger("llmc")

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What errors of CUDA and of its libraries say where the card has no room."""


def is_available() -> bool:
    """Whether this torch can use a card here. False with a build of torch without CUDA, or without a driver for it."""
    import torch

    return bool(torch.cuda.is_available())


def cuda_version() -> str | None:
    """The CUDA that this torch was built with, as "13.0"; None: a build without."""
    import torch

    found: str | None = torch.version.cuda
    return found


class CudaCard:
    """This process's current card. Raises DeviceError where it cannot be opened."""

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
                f"the NVIDIA card cannot be opened: {e}; see `nvidia-smi` for its driver, and whether another process "
                "holds it"
            ) from e

    # memory

    def memory(self) -> tuple[int, int]:
        """Bytes free now, and bytes that the card has, as its driver says: what torch keeps cached is not free."""
        self.synchronize()
        free, total = self._torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def put(self, tensor: Any) -> Any:
        """A copy of a tensor of the host on the card. Raises OutOfDeviceMemoryError."""
        with self.guarded():
            return tensor.to(self.device)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new tensor on the card, outside the pool. Raises OutOfDeviceMemoryError."""
        with self.guarded():
            return self._torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new tensor of the host that the card copies from and to without waiting."""
        return self._torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def give_back(self) -> None:
        """Give the driver back what torch keeps cached of memory that was freed; the pool keeps its own."""
        self.synchronize()
        self._torch.cuda.empty_cache()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, work goes to the card's stream, with nothing kept for gradients, and an error that says that the card
        is full is an OutOfDeviceMemoryError."""
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
        """Inside, what is allocated is the pool's, which graphs share. As `guarded`, too."""
        with self.guarded(), self._torch.cuda.use_mem_pool(self._pool, self.device):
            yield

    # execution

    def synchronize(self) -> None:
        """Wait for all that was asked of the card."""
        self._torch.cuda.synchronize(self.device)

    def mark_step(self) -> None:
        """Nothing: operators are launched when they are called."""

    def capture(self, run: Callable[[], object]) -> Any:
        """The graph of what `run` launches, nothing of which runs now; its memory is the pool's.

        `run` has run before, so that libraries have made what they make once. The graph reads and writes the tensors
        that `run` did, which have to live as long. Raises OutOfDeviceMemoryError, and DeviceError for what cannot be
        captured; then, and after an interrupt, nothing is left of it.
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
        """End a capture that failed, and let the pool know: `capture_end` of one that CUDA has invalidated raises
        before it does so, and the next capture would be refused ("already recording to mempool_id")."""
        from torch.cuda import memory

        try:
            graph.capture_end()
        except RuntimeError:
            try:
                memory._cuda_endAllocateToPool(self._index, self._pool.id)
            except RuntimeError:
                pass  # it was told, and `reset` gives the graph's part back
            else:
                memory._cuda_releasePool(self._index, self._pool.id)
        graph.reset()

    def close(self) -> None:
        """Give the pool and all that is cached back; graphs were reset before."""
        self._pool = None
        self.give_back()
