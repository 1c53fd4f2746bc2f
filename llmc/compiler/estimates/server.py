"""What a server of a bundle takes: memory, and time from its start until it is ready."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.targets.costs import Costs

BASE_BYTES = 1 << 30
"""Of a server beside weights and cache: the process, a step's activations, its confined children (docs/serving.md)."""
READ_BYTES_S = 100e6
"""What a node reads a second at the least, of a disk that others use too."""


@dataclass(frozen=True)
class ServerEstimate:
    """Of one bundle for a device with `costs`, made or estimated: bytes of all its files, its weights, and its caches
    at full length; the model's layers and parameters; its executables, of which so many are portable; the buckets that
    it warms up.

    `host_memory`: whether the host's memory has weights and cache. `shaped`: whether executables fix a dimension.
    """

    costs: Costs
    host_memory: bool
    size: int
    weight_bytes: int
    cache_bytes: int
    layers: int
    parameters: int
    executables: int
    portable: int
    buckets: Sequence[Bucket]
    shaped: bool

    @property
    def host_bytes(self) -> int:
        """Memory of the host: the files, which are mapped; the caches, unless the device has them; and BASE_BYTES.
        Whole MiB."""
        needed = self.size + BASE_BYTES + (self.cache_bytes if self.host_memory else 0)
        return math.ceil(needed / (1 << 20)) << 20

    @property
    def device_bytes(self) -> int:
        """Memory of the device for weights and caches; 0 where the host's has them."""
        return 0 if self.host_memory else self.weight_bytes + self.cache_bytes

    @property
    def start_seconds(self) -> float:
        """About how long a start takes until the server is ready.

        Its files are read, every executable is opened, and every bucket runs once, or the largest ones where one
        executable runs any shape: by the target's own times, those of verification (`Verifying`). On a device that is
        not the host, a portable executable takes the target's `device_seconds`.
        """
        times, size = self.costs.verifying, (self.layers, self.parameters)
        seconds = self.size / READ_BYTES_S + self.executables * times.opened.of(*size)
        seconds += self.portable * self.costs.device_seconds
        if not self.host_memory:
            return seconds
        buckets = self.buckets
        if not self.shaped:
            buckets = tuple({b.phase: b for b in sorted(buckets, key=lambda b: b.tokens)}.values())
        tokens = sum(b.tokens for b in buckets if b.phase == "prompt")
        return seconds + len(buckets) * times.step.of(*size) + tokens / 1000 * times.tokens.of(*size)
