"""A fake device's memory, and the graphs that it captures there.

    total = weights + workspace + KV cache + graphs + free          bytes

A step that replays no graph computes in the workspace, which grows to the largest such step and never shrinks, as an
allocator's pool does. A graph holds buffers of its own in its bucket's shape, as the graphs of real devices do: a
replay copies its inputs in there, and computes from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llmc.buckets.bucket import Bucket
from llmc.buckets.render.text import size_text
from llmc.errors import InputError, OutOfDeviceMemoryError
from llmc.runtime.step import Step, pad

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.fake.program import Array, Ints, Program

NUMBER = 4
"""Bytes of a float32."""


class Runner(Protocol):
    """What the device asks of its executor."""

    bundle: Bundle
    capacity: int
    hidden: int

    def program(self, bucket: Bucket) -> Program:
        """The executable of a bucket, opened."""
        ...

    def replay(
        self, program: Program, token_ids: Ints, past_lengths: Ints, new_lengths: Ints, past: Array
    ) -> tuple[Array, Array]:
        """Compute it."""
        ...

    def run(self, step: Step) -> NDArray[np.float32]:
        """Run a step."""
        ...

    def make_cache(self, slots: int) -> None:
        """An empty cache of so many slots."""
        ...


@dataclass(frozen=True)
class Graph:
    """What a bucket's graph reads from: token_ids [B, Q], past_lengths [B], new_lengths [B], past [B, context, H]."""

    token_ids: Ints
    past_lengths: Ints
    new_lengths: Ints
    past: Array

    @classmethod
    def of(cls, bucket: Bucket, hidden: int) -> Graph:
        """Empty buffers of the bucket's shape."""
        batch = bucket.batch
        return cls(
            np.zeros((batch, bucket.query), np.int64), np.zeros(batch, np.int64), np.zeros(batch, np.int64),
            np.zeros((batch, bucket.context, hidden), np.float32),
        )  # fmt: skip

    def load(self, step: Step, past: Array) -> tuple[Ints, Ints, Ints, Array]:
        """Copy a step's inputs in, and return them from there."""
        self.token_ids[...] = step.token_ids
        self.past_lengths[...] = step.past_lengths
        self.new_lengths[...] = step.new_lengths
        self.past[...] = past
        return self.token_ids, self.past_lengths, self.new_lengths, self.past


class FakeGraphDevice:
    """The GraphDevice of a fake executor with `total` bytes; raises OutOfDeviceMemoryError for fewer than weights take.

    A test overrides what it wants to be told: `size_of`, what a graph takes; `free_memory`, what the device says.
    """

    graphs = "fake graphs"

    def __init__(self, executor: Runner, total: int) -> None:
        self._executor, self._total = executor, total
        self._hidden, self._vocab = executor.hidden, executor.bundle.size("vocab_size")
        self._weights = 2 * self._vocab * self._hidden * NUMBER
        self._workspace = self._cache = 0
        self._captured: dict[Bucket, tuple[Graph, int]] = {}
        self._require(0, f"{size_text(self._weights)} of weights do not fit; name the device with more")

    @property
    def block_bytes(self) -> int:
        """A vector a token."""
        return self._executor.bundle.plan.limits.block_size * self._hidden * NUMBER

    def total_memory(self) -> int:
        """As the device was named."""
        return self._total

    def free_memory(self) -> int:
        """What nothing has taken."""
        return self._left

    def size_of(self, bucket: Bucket) -> int:
        """Inputs and outputs at the bucket's shape, see Program.replay."""
        vectors = bucket.batch * (bucket.context + bucket.query) * self._hidden
        integers = 2 * bucket.batch * (bucket.query + 2)
        return NUMBER * (vectors + integers + bucket.batch * self._vocab)

    def expected(self, bucket: Bucket) -> int:
        """What a graph takes follows from its shape."""
        return self.size_of(bucket)

    def run(self, bucket: Bucket) -> None:
        """Compute the bucket on zeros in the workspace. Raises OutOfDeviceMemoryError where that has no room."""
        self._work(bucket)
        blank = Graph.of(bucket, self._hidden)
        blank.new_lengths.fill(1)
        executor = self._executor
        program = executor.program(bucket)
        executor.replay(program, blank.token_ids, blank.past_lengths, blank.new_lengths, blank.past)

    def allocate(self, blocks: int) -> None:
        """As many slots as these blocks hold whole."""
        executor = self._executor
        tokens = blocks * executor.bundle.plan.limits.block_size
        if tokens < executor.capacity:
            raise InputError(
                f"a KV cache of {tokens} tokens holds no sequence of {executor.capacity}; leave more memory to it: "
                "lower --graph-reserved-mem, or plan for a shorter --max-model-len"
            )
        self.hold_cache(tokens)
        executor.make_cache(tokens // executor.capacity)

    def hold_cache(self, tokens: int) -> None:
        """Take the bytes of a KV cache of so many tokens; raises OutOfDeviceMemoryError where there are not so many."""
        size = tokens * self._hidden * NUMBER
        self._require(size, f"a KV cache of {tokens} tokens takes {size_text(size)}; compile for fewer or shorter ones")
        self._cache = size

    def capture(self, bucket: Bucket) -> int:
        """Run the bucket once as it is, then keep its buffers."""
        self._executor.run(pad(bucket, [0], [[0] * bucket.query], [0]))
        size = self.size_of(bucket)
        self._require(size, f"the graph of {bucket} takes {size_text(size)}")
        self._captured[bucket] = Graph.of(bucket, self._hidden), size
        return size

    def inputs(self, step: Step, past: Array) -> tuple[Ints, Ints, Ints, Array]:
        """What a step is computed from: the buffers of its bucket's graph, or the step itself, in the workspace."""
        bucket = Bucket(step.phase, step.batch, step.query, step.context)
        if bucket in self._captured:
            return self._captured[bucket][0].load(step, past)
        self._work(bucket)
        return step.token_ids, step.past_lengths, step.new_lengths, past

    @property
    def _left(self) -> int:
        graphs = sum(size for _, size in self._captured.values())
        return self._total - self._weights - self._workspace - self._cache - graphs

    def _work(self, bucket: Bucket) -> None:
        more = max(0, self.size_of(bucket) - self._workspace)
        self._require(more, f"running {bucket} takes {size_text(more)} more")
        self._workspace += more

    def _require(self, more: int, what: str) -> None:
        if self._left < more:
            raise OutOfDeviceMemoryError(
                f"the fake device has {size_text(max(0, self._left))} of {size_text(self._total)} free: {what}"
            )
