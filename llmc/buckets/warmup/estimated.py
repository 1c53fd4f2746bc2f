"""The device of a dry run: graphs take what an estimate says."""

from __future__ import annotations

from llmc.buckets.bucket import Bucket
from llmc.buckets.warmup.predict import SizeOf
from llmc.buckets.warmup.sizes import size_text
from llmc.errors import OutOfDeviceMemoryError


class EstimatedDevice:
    """`free` bytes of memory, of which the graph of a bucket takes `size_of(bucket)`; nothing is run."""

    def __init__(self, free: int, size_of: SizeOf) -> None:
        self._free, self._size_of = free, size_of

    def free_memory(self) -> int:
        """Bytes that no graph has taken."""
        return self._free

    def capture(self, bucket: Bucket) -> int:
        """Take the graph's bytes. Raises OutOfDeviceMemoryError when there are not so many."""
        size = self._size_of(bucket)
        if size > self._free:
            raise OutOfDeviceMemoryError(f"{bucket} takes {size_text(size)}; {size_text(self._free)} are free")
        self._free -= size
        return size
