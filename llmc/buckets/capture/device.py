"""A device that captures graphs, as the start of a server sees it: weights on it, then a KV cache, then graphs."""

from __future__ import annotations

from typing import Protocol

from llmc.buckets.bucket import Bucket
from llmc.errors import DeviceError


class CaptureDevice(Protocol):
    """A device that records graphs, weights and KV cache already on it."""

    def free_memory(self) -> int:
        """Bytes that are free now."""
        ...

    def capture(self, bucket: Bucket) -> int:
        """Run the bucket through the function that serves, record its graph, and return the bytes that it took.

        Raises OutOfDeviceMemoryError when there is no room, DeviceError for a bucket that cannot be captured.
        """
        ...


class GraphDevice(CaptureDevice, Protocol):
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

    def total_memory(self) -> int:
        """Bytes that it has."""
        ...

    def run(self, bucket: Bucket) -> None:
        """Run the bucket on dummy data, without a cache."""
        ...

    def expected(self, bucket: Bucket) -> int:
        """Bytes that the bucket's graph should take, before one of its phase was measured; 0: nobody knows."""
        ...

    def allocate(self, blocks: int) -> None:
        """Make the KV cache, of so many blocks; how many sequences fit is the executor's `slots` from then on.

        Raises OutOfDeviceMemoryError where the device has no room, InputError for fewer than one sequence needs.
        """
        ...


def checked(count: object) -> int:
    """What a device states as a number of bytes; raises DeviceError for anything that is none."""
    if type(count) is not int or count < 0:
        raise DeviceError(
            f"the device states {count!r} as bytes of its memory, so no budget for graphs can be kept; run without "
            "graphs (--graph-reserved-mem 0), or mend its driver"
        )
    return count
