"""Streams, pools and graphs. A capture records the operators that run; a replay runs them again where they ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from tests.fakes.cuda import state
from tests.fakes.cuda.allocator import Block
from tests.fakes.cuda.tensor import inside, tensors_in

NODE_BYTES = 4096
"""What a node of a graph takes of the GPU: made up."""

_numbers = count(1)
_TAKEN = "beginAllocateToPool: already recording to mempool_id"
_NOT_TAKEN = "endAllocatePool: not currently recording to mempool_id"


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.number = next(_numbers)

    def synchronize(self) -> None:
        state.gpu().wait()


@contextmanager
def stream(given: Stream) -> Iterator[None]:
    gpu = state.gpu()
    before, gpu.stream = gpu.stream, given.number
    try:
        yield
    finally:
        gpu.stream = before


class MemPool:
    def __init__(self) -> None:
        self.id = (0, next(_numbers))
        self._gpu = state.gpu()
        _join(self._gpu, self.id)

    def __del__(self) -> None:
        self._gpu.allocator.users[self.id] -= 1


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    begin_allocate_to_pool(pool.id)
    try:
        yield
    finally:
        end_allocate_to_pool(0, pool.id)
        release_pool(0, pool.id)


def _join(gpu: state.Gpu, pool: tuple[int, int]) -> None:
    users = gpu.allocator.users
    if users.get(pool) == 0:
        raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
    users[pool] = users.get(pool, 0) + 1


def begin_allocate_to_pool(pool: tuple[int, int], capture: Any = None) -> None:
    gpu = state.gpu()
    _join(gpu, pool)
    if pool in gpu.recording:
        raise RuntimeError(_TAKEN)
    gpu.recording[pool] = (lambda: True) if capture is None else lambda: gpu.capturing is capture


def end_allocate_to_pool(device: int, pool: tuple[int, int]) -> None:
    if state.gpu().recording.pop(pool, None) is None:
        raise RuntimeError(_NOT_TAKEN)


def release_pool(device: int, pool: tuple[int, int]) -> None:
    state.gpu().allocator.users[pool] -= 1


class CUDAGraph:
    def __init__(self, keep_graph: bool = False) -> None:
        self._recorded: list[Any] = []
        self._ended = False
        self._size = self.nodes = 0
        self._pool: tuple[int, int] = (0, 0)
        self.blocks: list[Block] = []

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        results = [t._inner for t in tensors_in(result)] if not func._schema.is_mutable else []
        self._recorded.append((func, inside(args), inside(kwargs), results))

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        gpu = state.gpu()
        if self._ended:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        if not gpu.stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"Unknown capture error mode {capture_error_mode}")
        self._pool = pool or (next(_numbers), 0)
        begin_allocate_to_pool(self._pool, self)
        if gpu.capturing is not None:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
        gpu.capturing = self

    def capture_end(self) -> None:
        gpu = state.gpu()
        if gpu.capturing is not self:
            raise torch.AcceleratorError("CUDA error: invalid argument")
        gpu.capturing, invalid, gpu.invalid = None, gpu.invalid, False
        if invalid:  # before the allocator is told: CUDAGraph.cpp
            raise torch.AcceleratorError(f"CUDA error: {state.INVALIDATED}")
        end_allocate_to_pool(0, self._pool)
        self._ended = True
        size = NODE_BYTES * self.nodes
        if size > gpu.allocator.available:
            raise torch.AcceleratorError("CUDA error: out of memory")
        self._size = size
        gpu.allocator.held += size

    def replay(self) -> None:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        gpu = state.gpu()
        gpu.check()
        own: set[int] = set()
        for func, args, kwargs, results in self._recorded:
            own.update(tensor.untyped_storage()._cdata for tensor in results)
            if func.is_view:
                continue
            out = func(*args, **kwargs)
            for old, new in zip(results, tensors_in(out), strict=True) if results else ():
                if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)
        gpu.overwrite(self.blocks, own)

    def reset(self) -> None:
        gpu = state.gpu()
        if self._ended:
            release_pool(0, self._pool)
            gpu.allocator.held -= self._size
        self._recorded, self._ended, self._size, self.blocks = [], False, 0, []

    def pool(self) -> tuple[int, int]:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool


def empty_cache() -> None:
    state.gpu().allocator.empty_cache()


NAMES: dict[str, Any] = {
    "Stream": Stream, "stream": stream, "MemPool": MemPool, "use_mem_pool": use_mem_pool, "CUDAGraph": CUDAGraph,
    "empty_cache": empty_cache,
}  # fmt: skip
