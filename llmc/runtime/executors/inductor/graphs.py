"""The card as a device that captures graphs (buckets/warmup/device.py), in the mode of CUDA graphs.

Every step, captured or not, allocates from one pool (cuda.py). The profile run makes it as large as the largest prompt
and the largest decode bucket need, so what a graph adds is what CUDA holds for its kernels: about as much for each, as
all buckets of a phase have the same kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from llmc.runtime.executors.whole_step.graphs import CardGraphs, step_of

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.executors.inductor.cuda import CudaCard
    from llmc.runtime.executors.whole_step.cache import CardCache
    from llmc.runtime.executors.whole_step.graphs import Runner

PIECE = 2 << 20
"""Bytes that CUDA takes of a card at once, which the first graph is expected to need (cuMemGetAllocationGranularity of
NVIDIA's cards, CUDA 12 and 13); after it, graphs are expected to take what the largest of their phase did."""


class CudaGraphs(CardGraphs):
    """See the module's docstring."""

    graphs: ClassVar[str] = "CUDAGraphs"
    kind: ClassVar[str] = "GPU"

    def __init__(self, executor: Runner, card: CudaCard, cache: CardCache) -> None:
        super().__init__(executor, card, cache)
        self._cuda = card

    def expected(self, bucket: Bucket) -> int:
        """The same for every graph."""
        del bucket
        return PIECE

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
