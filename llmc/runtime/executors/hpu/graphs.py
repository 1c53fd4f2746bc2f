"""The card as a device that captures graphs (buckets/warmup/device.py), in HPU Graphs mode."""

from __future__ import annotations

from typing import ClassVar

from llmc.runtime.executors.hpu.recipes import KV_BLOCKS
from llmc.runtime.executors.whole_step.graphs import CardGraphs


class HpuGraphs(CardGraphs):
    """With as many blocks as the bundle pins, where it does."""

    graphs: ClassVar[str] = "HPUGraphs"
    kind: ClassVar[str] = "HPU"

    def allocate(self, blocks: int) -> None:
        """The blocks that the bundle pins, or these."""
        super().allocate(self._executor.bundle.option(KV_BLOCKS, 0) or blocks)
