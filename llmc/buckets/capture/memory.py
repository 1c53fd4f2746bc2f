"""Division of device memory: weights and the profile run first, then a margin, the KV cache and the graphs."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.buckets.capture.device import GraphDevice, checked
from llmc.buckets.capture.options import CaptureOptions
from llmc.buckets.capture.order import warm_up_order
from llmc.buckets.plan import Plan
from llmc.buckets.render.text import size_text, table
from llmc.errors import DeviceError, InputError


@dataclass(frozen=True)
class Memory:
    """Device memory, all in bytes. `profile_run` is what a dummy run, after loading weights, took and kept.

    `block_bytes` is the size of a KV cache block of `block_tokens` tokens: keys and values of all layers, and a share
    of a sequence's recurrent state. The cache must hold at least one sequence of `longest` tokens. Raises InputError
    for memory that does not hold the weights, or that cache.
    """

    total: int
    weights: int
    profile_run: int
    block_bytes: int
    block_tokens: int
    longest: int
    options: CaptureOptions

    def __post_init__(self) -> None:
        if self.free <= 0:
            raise InputError(
                f"{size_text(self.total)} of device memory cannot hold {size_text(self.weights)} of weights and "
                f"{size_text(self.profile_run)} of the profile run; quantise the model, or take more devices"
            )
        if self.blocks < (needed := -(-self.longest // self.block_tokens)):
            raise InputError(
                f"{size_text(self.kv_reserved)} for the KV cache hold {self.blocks} blocks of "
                f"{size_text(self.block_bytes)}; one sequence of {self.longest} tokens needs {needed}: raise "
                "--gpu-memory-utilization, lower --graph-reserved-mem or plan for a shorter --max-model-len"
            )

    @property
    def free(self) -> int:
        """Free after the profile run, before the KV cache is allocated."""
        return self.total - self.weights - self.profile_run

    @property
    def usable(self) -> int:
        """For the KV cache and graphs together."""
        return int(self.free * self.options.gpu_memory_utilization)

    @property
    def margin(self) -> int:
        """Reserve that neither the KV cache nor graphs may take."""
        return self.free - self.usable

    @property
    def graphs(self) -> int:
        """Reserved for graphs; graphs also get the rest that does not fill a KV cache block."""
        return int(self.usable * self.options.graph_reserved_mem)

    @property
    def kv_reserved(self) -> int:
        """Reserved for the KV cache."""
        return self.usable - self.graphs

    @property
    def blocks(self) -> int:
        """Whole blocks of the KV cache."""
        return self.kv_reserved // self.block_bytes

    @property
    def kv_cache(self) -> int:
        """Bytes that the whole blocks take."""
        return self.blocks * self.block_bytes

    @property
    def free_for_capture(self) -> int:
        """Free after the KV cache is allocated, including the margin; `capture` starts with it."""
        return self.free - self.kv_cache

    def line(self, graphs: str = "graphs") -> str:
        """Return the division as the guide logs it; `graphs` is the device's name for graphs."""
        options = self.options
        return (
            f"Free device memory: {size_text(self.free)}, {size_text(self.usable)} usable "
            f"(gpu_memory_utilization={options.gpu_memory_utilization:g}), {size_text(self.graphs)} reserved for "
            f"{graphs} (VLLM_GRAPH_RESERVED_MEM={options.graph_reserved_mem:g}), {size_text(self.kv_reserved)} "
            "reserved for KV cache"
        )

    def text(self, captured: int) -> str:
        """Return a table row for each step from an empty device to `captured` bytes of graphs; ends in a newline."""
        steps = (
            ("weights", self.weights), ("profile run", self.profile_run),
            (f"KV cache: {self.blocks:,} blocks, {self.blocks * self.block_tokens:,} tokens", self.kv_cache),
            ("graphs", captured),
        )  # fmt: skip
        rows, used = [("", "takes", "used", "free")], 0
        for name, size in steps:
            used += size
            rows.append((name, size_text(size), size_text(used), size_text(self.total - used)))
        rows.append(("margin, kept free", size_text(self.margin), "", ""))
        return "\n".join(table(rows, (1, 2, 3))) + "\n"

    def to_dict(self) -> dict[str, int]:
        """Return the division as a JSON object."""
        return {
            "total": self.total, "weights": self.weights, "profile_run": self.profile_run, "free": self.free,
            "usable": self.usable, "margin": self.margin, "graphs": self.graphs, "kv_cache": self.kv_cache,
            "kv_blocks": self.blocks, "free_for_capture": self.free_for_capture,
        }  # fmt: skip


def profile(
    device: GraphDevice, plan: Plan, block_bytes: int, options: CaptureOptions, longest: int | None = None
) -> Memory:
    """Run the plan's largest prompt bucket and divide the memory that is then free; `block_bytes` is per KV cache
    block.

    `longest` is the least cache size in tokens; None means the plan's max_model_len. Memory that the run frees counts
    as free, and reduces the weights' size. Raises DeviceError for reported sizes that are invalid, InputError for
    memory that does not hold the model or the cache of one sequence; errors of the run propagate.
    """
    total, before = checked(device.total_memory()), checked(device.free_memory())
    device.run(warm_up_order(plan.prompt)[0])
    after = checked(device.free_memory())
    if (most := max(before, after)) > total:
        raise DeviceError(
            f"the device reports {size_text(most)} of {size_text(total)} of memory as free; fix its driver"
        )
    kept = max(0, before - after)
    limits = plan.limits
    return Memory(
        total, total - after - kept, kept, block_bytes, limits.block_size, longest or limits.max_model_len, options
    )  # fmt: skip
