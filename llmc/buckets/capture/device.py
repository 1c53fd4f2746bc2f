"""A device that captures graphs, as the start of a server sees it: weights on it, then a KV cache, then graphs."""

from __future__ import annotations

from typing import Protocol

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.graphs import CaptureDevice
from llmc.buckets.capture.memory import ProfiledDevice


class GraphDevice(ProfiledDevice, CaptureDevice, Protocol):
    """Called in this order, before requests come: `run` once, `allocate` once, `capture` for each graph.

    `run` takes memory that stays taken, as a run of any bucket would, and neither needs nor makes a KV cache. `capture`
    leaves the cache as it was, but for slot 0. A captured bucket's steps give what its uncaptured ones gave. What an
    interrupt ends in the middle leaves no half graph behind.
    """

    @property
    def graphs(self) -> str:
        """What log lines call its graphs: "HPUGraphs"."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV cache block, of the plan's `block_size` tokens, in all layers, with their share of states."""
        ...

    def expected(self, bucket: Bucket) -> int:
        """Bytes that the bucket's graph should take, before one of its phase was measured; 0: nobody knows."""
        ...

    def allocate(self, blocks: int) -> None:
        """Make the KV cache, of so many blocks; how many sequences fit is the executor's `slots` from then on.

        Raises OutOfDeviceMemoryError where the device has no room, InputError for fewer than one sequence needs.
        """
        ...
