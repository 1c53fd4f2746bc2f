"""A simulated device for dry runs, whose graphs take estimated sizes."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.buckets.bucket import PHASES, Bucket
from llmc.buckets.capture.graphs import CaptureResults, OnCapture, capture
from llmc.buckets.capture.log import hold_none
from llmc.buckets.capture.memory import Memory
from llmc.buckets.capture.predict import SizeOf
from llmc.buckets.render.text import size_text
from llmc.errors import InputError, OutOfDeviceMemoryError


class EstimatedDevice:
    """A device with `free` bytes of memory, where a bucket's graph takes `size_of(bucket)` bytes; it runs nothing."""

    def __init__(self, free: int, size_of: SizeOf) -> None:
        self._free, self._size_of = free, size_of

    def free_memory(self) -> int:
        """Return the bytes that no graph has taken."""
        return self._free

    def capture(self, bucket: Bucket) -> int:
        """Take the graph's bytes. Raises OutOfDeviceMemoryError when too few are free."""
        size = self._size_of(bucket)
        if size > self._free:
            raise OutOfDeviceMemoryError(f"{bucket} takes {size_text(size)}; {size_text(self._free)} are free")
        self._free -= size
        return size


def dry_run(
    buckets: Sequence[Bucket], memory: Memory, size_of: SizeOf, on_progress: OnCapture = lambda _: None
) -> CaptureResults:
    """Return which of `buckets` would be captured in `memory` if graphs take `size_of` bytes.

    Raises InputError for a budget that is too small for every graph. A budget of 0 is allowed.
    """
    device = EstimatedDevice(memory.free_for_capture, size_of)
    outcome = capture(device, buckets, memory.margin, memory.options, dict.fromkeys(PHASES, size_of), on_progress)
    if outcome.budget and outcome.empty:
        raise InputError(hold_none(outcome, buckets, size_of))
    return outcome
