"""Interface of a device that captures graphs. A server start loads weights, allocates the KV cache, then captures
graphs.
"""

from __future__ import annotations

from typing import Protocol

from llmc.buckets.bucket import Bucket
from llmc.errors import DeviceError


class CaptureDevice(Protocol):
    """A device that captures graphs after its weights and KV cache are in place."""

    def free_memory(self) -> int:
        """Return the bytes that are free now."""
        ...

    def capture(self, bucket: Bucket) -> int:
        """Run the bucket through the serving function, capture its graph, and return the bytes that it took.

        Raises OutOfDeviceMemoryError when there is no room, DeviceError for a bucket that cannot be captured.
        """
        ...


class GraphDevice(CaptureDevice, Protocol):
    """A device that is called before serving, in this order: `run` once, `allocate` once, `capture` for each graph.

    `run` keeps the memory that it takes, as a run of any bucket would. It neither needs nor creates a KV cache.
    `capture` changes only slot 0 of the cache. A captured bucket returns the same results as an uncaptured one. An
    interrupted capture leaves no partial graph.
    """

    @property
    def graphs(self) -> str:
        """Name of its graphs in log lines: "HPUGraphs"."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV cache block of the plan's `block_size` tokens, in all layers, including its share of recurrent
        state.
        """
        ...

    def total_memory(self) -> int:
        """Return the device memory size in bytes."""
        ...

    def run(self, bucket: Bucket) -> None:
        """Run the bucket on dummy data, without a cache."""
        ...

    def expected(self, bucket: Bucket) -> int:
        """Return the expected bytes of the bucket's graph before its phase has a measurement; 0 if unknown."""
        ...

    def allocate(self, blocks: int) -> None:
        """Allocate a KV cache of `blocks` blocks; this sets the number of sequences, the executor's `slots`.

        Raises OutOfDeviceMemoryError where the device has no room, InputError if one sequence needs more blocks.
        """
        ...


def checked(count: object) -> int:
    """Return the number of bytes that a device reported. Raises DeviceError for any other value."""
    if type(count) is not int or count < 0:
        raise DeviceError(
            f"the device reports {count!r} bytes of memory, so graphs have no memory budget; run without graphs "
            "(--graph-reserved-mem 0), or fix its driver"
        )
    return count
