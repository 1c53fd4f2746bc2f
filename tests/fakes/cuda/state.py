"""The card of this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.fakes.cuda.allocator import Allocator, Block

UNSUPPORTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"


class Gpu:
    """`stream`: the current one, 0 is the default; `recording`: pools that take allocations, and when; `capturing`: a
    graph, whose capture is `invalid` once something was not permitted."""

    def __init__(self, memory: int) -> None:
        self.allocator = Allocator(memory)
        self.stream = 0
        self.recording: dict[Hashable, Callable[[], bool]] = {}
        self.capturing: Any = None
        self.invalid = False
        self.synchronized = 0
        self.launched = 0
        self._within, self._computed = 0, False
        self._storages: dict[int, list[Any]] = {}

    # memory

    def hold(self, owner: Any, storage: Any) -> None:
        """Count a storage as long as any tensor is on it."""
        key = storage._cdata
        if key not in self._storages:
            block = self.allocator.malloc(storage.nbytes(), self._pool())
            if self.capturing is not None:
                self.capturing.blocks.append(Block(block.segment, block.begin, block.size))
            self._storages[key] = [0, block, storage]
        self._storages[key][0] += 1
        weakref.finalize(owner, self.drop, key)

    def drop(self, key: int) -> None:
        """One tensor fewer. What was freed is garbage from then on, also for a graph that still reads it."""
        held = self._storages[key]
        held[0] -= 1
        if not held[0]:
            del self._storages[key]
            self.allocator.free(held[1])
            held[2].fill_(0xFF)

    def overwrite(self, blocks: list[Block], but: set[int]) -> None:
        """A replay wrote to these: whatever else lives there now is garbage."""
        for key, (_, block, storage) in self._storages.items():
            if key not in but and any(block.overlaps(other) for other in blocks):
                storage.fill_(0xFF)

    def _pool(self) -> Hashable:
        return next((pool for pool, takes in self.recording.items() if takes()), ("stream", self.stream))

    # execution

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Inside are the parts of an operator that is one kernel on a card, or none where all of them are views."""
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1
            if not self._within and self._computed:
                self._computed = False
                self.count_kernel()

    def count_kernel(self) -> None:
        """A kernel was launched, or captured."""
        if self._within:
            self._computed = True
            return
        self.launched += 1
        if self.capturing is not None:
            self.capturing.nodes += 1

    def wait(self) -> None:
        """What makes the host wait for the card."""
        self.check()
        if self.capturing is not None:
            self.invalid = True
            raise torch.AcceleratorError(f"CUDA error: {UNSUPPORTED}")
        self.synchronized += 1

    def check(self) -> None:
        if self.invalid:
            raise torch.AcceleratorError(f"CUDA error: {INVALIDATED}")


_gpu = Gpu(1 << 30)


def gpu() -> Gpu:
    return _gpu


def reset(memory: int) -> Gpu:
    """A new, empty card."""
    global _gpu  # noqa: PLW0603
    _gpu = Gpu(memory)
    return _gpu
