"""A card as a device that captures graphs (buckets/capture/device.py)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar, Protocol

from llmc.errors import InputError
from llmc.runtime.step import pad

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.whole_step.cache import CardCache
    from llmc.runtime.executors.whole_step.card import Card
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


class CardGraphs:
    """See buckets/capture/device.py. `kind` is what log lines call the card's memory."""

    graphs: ClassVar[str]
    kind: ClassVar[str]

    def __init__(self, executor: Runner, card: Card, cache: CardCache) -> None:
        self._executor, self._card, self._cache = executor, card, cache

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the plan's block_size tokens: its share of a slot, states included."""
        return -(-self._cache.slot_bytes * self._executor.bundle.plan.limits.block_size // self._executor.capacity)

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
            self._executor.run(step_of(bucket))
        finally:
            self._cache.drop()

    def allocate(self, blocks: int) -> None:
        """As many sequences of the plan's full length as these blocks hold whole."""
        tokens, capacity = blocks * self._executor.bundle.plan.limits.block_size, self._executor.capacity
        if tokens < capacity:
            raise InputError(
                f"a KV cache of {tokens} tokens holds no sequence of {capacity}; leave more memory to it: lower "
                "--graph-reserved-mem, or plan for a shorter --max-model-len"
            )
        _log.info("# %s blocks: %d, # CPU blocks: 0", self.kind, blocks)
        self._executor.resize(tokens // capacity)

    def capture(self, bucket: Bucket) -> int:
        """Capture its graph; the bytes that are less free afterwards."""
        before = self.free_memory()
        executable = self._executor.bundle.executable(bucket.phase, bucket.batch, bucket.query, bucket.context)
        self._executor.capture(executable, step_of(bucket))
        return before - self.free_memory()


def step_of(bucket: Bucket) -> Step:
    """A step of the bucket's shape, with one live row in slot 0."""
    return pad(bucket, [0], [[0] * bucket.query], [0])
