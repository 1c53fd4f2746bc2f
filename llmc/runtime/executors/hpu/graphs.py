"""The card as a device that captures graphs (buckets/warmup/device.py), in HPU Graphs mode."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from llmc.errors import InputError
from llmc.runtime.executors.hpu.recipes import KV_BLOCKS
from llmc.runtime.step import pad

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.hpu.cache import CardCache
    from llmc.runtime.executors.hpu.habana import Card
    from llmc.runtime.step import Step

_log = logging.getLogger("llmc")


class Runner(Protocol):
    """What the device asks of its executor."""

    bundle: Bundle
    capacity: int

    def run(self, step: Step) -> object:
        """Run a step."""
        ...

    def capture(self, executable: Executable, step: Step) -> None:
        """Capture its graph."""
        ...

    def resize(self, slots: int) -> None:
        """An empty cache of so many slots."""
        ...


class HpuGraphs:
    """See buckets/warmup/device.py."""

    graphs = "HPUGraphs"

    def __init__(self, executor: Runner, card: Card, cache: CardCache) -> None:
        self._executor, self._card, self._cache = executor, card, cache

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the plan's block_size tokens."""
        return self._executor.bundle.plan.limits.block_size * self._cache.token_bytes

    def total_memory(self) -> int:
        """Bytes that the card has."""
        return self._card.memory()[1]

    def free_memory(self) -> int:
        """Bytes that are free now."""
        return self._card.memory()[0]

    def expected(self, bucket: Bucket) -> int:
        """Unknown: the first graph of a phase is measured."""
        del bucket
        return 0

    def run(self, bucket: Bucket) -> None:
        """Run the bucket over a cache of one sequence, which is given back."""
        self._cache.make(1)
        try:
            self._executor.run(_step(bucket))
        finally:
            self._cache.drop()

    def allocate(self, blocks: int) -> None:
        """As many sequences of the plan's full length as these blocks hold whole, or those that the bundle pins."""
        blocks = self._executor.bundle.option(KV_BLOCKS, 0) or blocks
        tokens, capacity = blocks * self._executor.bundle.plan.limits.block_size, self._executor.capacity
        if tokens < capacity:
            raise InputError(
                f"a KV cache of {tokens} tokens holds no sequence of {capacity}; leave more memory to it: lower "
                "--graph-reserved-mem, or plan for a shorter --max-model-len"
            )
        _log.info("# HPU blocks: %d, # CPU blocks: 0", blocks)
        self._executor.resize(tokens // capacity)

    def capture(self, bucket: Bucket) -> int:
        """Capture its graph; the bytes that are less free afterwards."""
        before = self.free_memory()
        executable = self._executor.bundle.executable(bucket.phase, bucket.batch, bucket.query, bucket.context)
        self._executor.capture(executable, _step(bucket))
        return before - self.free_memory()


def _step(bucket: Bucket) -> Step:
    return pad(bucket, [0], [[0] * bucket.query], [0])
