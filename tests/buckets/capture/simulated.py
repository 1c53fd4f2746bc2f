"""Devices that record nothing: their graphs' sizes, failures and lies are injected."""

from __future__ import annotations

from collections.abc import Callable

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.dry_run import EstimatedDevice
from llmc.errors import OutOfDeviceMemoryError

MIB, GIB = 1 << 20, 1 << 30


class SimulatedDevice(EstimatedDevice):
    """`fails_at` is where it runs out of memory whatever it says is free; `says` is what it claims that a graph took,
    `shows` what it claims to be free."""

    def __init__(
        self, free: int, size_of: Callable[[Bucket], int], *, fails_at: Bucket | None = None,
        says: Callable[[int], int] = lambda size: size, shows: Callable[[int], object] = lambda free: free,
    ) -> None:  # fmt: skip
        super().__init__(free, size_of)
        self.fails_at, self.says, self.shows = fails_at, says, shows
        self.graphs: list[Bucket] = []

    def free_memory(self) -> int:
        return self.shows(super().free_memory())  # type: ignore[return-value]

    def capture(self, bucket: Bucket) -> int:
        if bucket == self.fails_at:
            raise OutOfDeviceMemoryError(f"no room for {bucket}")
        size = super().capture(bucket)
        self.graphs.append(bucket)
        return self.says(size)


def prompt(batch: int, query: int, context: int = 0) -> Bucket:
    return Bucket("prompt", batch, query, context)


def decode(batch: int, context: int) -> Bucket:
    return Bucket("decode", batch, 1, context)


PROMPTS = [prompt(batch, 128 * n) for batch in (1, 2, 4) for n in range(1, 9)]
DECODES = [decode(batch, 128 * n) for batch in (1, 2, 4) for n in range(1, 17)]
GUIDE = [*PROMPTS, *DECODES]
"""The buckets of the guide's logged run: 24 prompt, 48 decode."""
