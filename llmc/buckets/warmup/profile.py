"""The profile run: what a device's memory is divided by."""

from __future__ import annotations

from typing import Protocol

from llmc.buckets.bucket import Bucket
from llmc.buckets.plan import Plan
from llmc.buckets.warmup.memory import Memory
from llmc.buckets.warmup.options import CaptureOptions
from llmc.buckets.warmup.order import warm_up_order
from llmc.buckets.warmup.sizes import checked, size_text
from llmc.errors import DeviceError


class ProfiledDevice(Protocol):
    """A device with the weights on it, and no KV cache yet."""

    def total_memory(self) -> int:
        """Bytes that it has."""
        ...

    def free_memory(self) -> int:
        """Bytes that are free now."""
        ...

    def run(self, bucket: Bucket) -> None:
        """Run the bucket on dummy data, without a cache."""
        ...


def profile(
    device: ProfiledDevice, plan: Plan, block_bytes: int, options: CaptureOptions, longest: int | None = None
) -> Memory:
    """Run the plan's largest prompt bucket, and divide what is free then; `block_bytes` of a KV cache block.

    `longest`: tokens that the cache has to have for one sequence; None: the plan's max_model_len.
    Memory that is free only after the run counts as free, the weights as so much smaller. Raises DeviceError for
    numbers that are no bytes of memory, InputError for memory that does not hold the model or one sequence of its
    cache, and what the run raises.
    """
    total, before = checked(device.total_memory()), checked(device.free_memory())
    device.run(warm_up_order(plan.prompt)[0])
    after = checked(device.free_memory())
    if (most := max(before, after)) > total:
        raise DeviceError(
            f"the device states {size_text(most)} of {size_text(total)} of memory as free; mend its driver"
        )
    kept = max(0, before - after)
    limits = plan.limits
    return Memory(
        total, total - after - kept, kept, block_bytes, limits.block_size, longest or limits.max_model_len, options
    )  # fmt: skip
