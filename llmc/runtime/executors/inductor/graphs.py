"""The card as a device that captures graphs (buckets/capture/device.py), in the mode of CUDA graphs.

Every step, captured or not, allocates from one pool (cuda.py). The profile run makes it as large as the largest prompt
and the largest decode bucket need, so what a graph adds is what CUDA holds for its kernels: in proportion to the
operators of its program, however many tokens they are for.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol

from llmc.runtime.executors.whole_step.graphs import CardGraphs, Runner, step_of

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.executors.inductor.cuda import CudaCard
    from llmc.runtime.executors.whole_step.cache import CardCache

PIECE = 2 << 20
"""Bytes that CUDA takes of a card at once (cuMemGetAllocationGranularity of NVIDIA's cards, CUDA 12 and 13): what the
graph of the most operators is expected to take, before one of its phase was measured."""


class Sized(Runner, Protocol):
    """What the device asks of its executor, too."""

    def operators(self, bucket: Bucket) -> int:
        """How many operators a bucket's program has."""
        ...


class CudaGraphs(CardGraphs):
    """See the module's docstring."""

    graphs: ClassVar[str] = "CUDAGraphs"
    kind: ClassVar[str] = "GPU"

    def __init__(self, executor: Sized, card: CudaCard, cache: CardCache) -> None:
        super().__init__(executor, card, cache)
        self._sized, self._cuda = executor, card

    def expected(self, bucket: Bucket) -> int:
        """In proportion to its operators."""
        return -(-PIECE * self._sized.operators(bucket) // self._most)

    @cached_property
    def _most(self) -> int:
        return max(map(self._sized.operators, self._executor.bundle.plan.buckets))

    def run(self, bucket: Bucket) -> None:
        """Run the bucket, and the decode bucket that reads most, over a cache of one sequence, which is given back."""
        decode = max(self._executor.bundle.plan.decode, key=lambda b: (b.batch * b.context, b.batch))
        self._cache.make(1)
        try:
            for one in (bucket, decode):
                self._executor.run(step_of(one))
        finally:
            self._cache.drop()
            self._cuda.give_back()
