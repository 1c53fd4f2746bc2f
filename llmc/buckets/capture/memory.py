"""A device's memory, divided: weights, profile run, and of what is free then a margin, the KV cache and the graphs."""

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
    """All numbers in bytes. `profile_run` is what a run of dummy data, weights loaded, took and kept.

    `block_bytes` of a KV cache block of `block_tokens` tokens: keys and values of all layers, and a share of the states
    of a sequence of `longest` tokens. A cache of one such sequence is the least that serves. Raises InputError for
    memory that does not hold the weights, or a KV cache below that.
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
                f"{size_text(self.total)} of device memory do not hold {size_text(self.weights)} of weights and "
                f"{size_text(self.profile_run)} of the profile run; quantise the model, or take more devices"
            )
        if self.blocks < (needed := -(-self.longest // self.block_tokens)):
            raise InputError(
                f"{size_text(self.kv_reserved)} for the KV cache are {self.blocks} blocks of "
                f"{size_text(self.block_bytes)}; one sequence of {self.longest} tokens needs {needed}: raise "
                "--gpu-memory-utilization, lower --graph-reserved-mem or plan for a shorter --max-model-len"
            )

    @property
    def free(self) -> int:
        """Free after the profile run, before the KV cache is allocated."""
        return self.total - self.weights - self.profile_run

    @property
    def usable(self) -> int:
        """For KV cache and graphs together."""
        return int(self.free * self.options.gpu_memory_utilization)

    @property
    def margin(self) -> int:
        """What neither may take."""
        return self.free - self.usable

    @property
    def graphs(self) -> int:
        """Reserved for graphs; what whole blocks leave of the KV cache comes on top."""
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
        """What these blocks take."""
        return self.blocks * self.block_bytes

    @property
    def free_for_capture(self) -> int:
        """Free when the KV cache is there, the margin included: what `capture` begins with."""
        return self.free - self.kv_cache

    def line(self, graphs: str = "graphs") -> str:
        """The division as the guide logs it; `graphs` is what the device calls them."""
        options = self.options
        return (
            f"Free device memory: {size_text(self.free)}, {size_text(self.usable)} usable "
            f"(gpu_memory_utilization={options.gpu_memory_utilization:g}), {size_text(self.graphs)} reserved for "
            f"{graphs} (VLLM_GRAPH_RESERVED_MEM={options.graph_reserved_mem:g}), {size_text(self.kv_reserved)} "
            "reserved for KV cache"
        )

    def text(self, captured: int) -> str:
        """A row for each step from an empty device to `captured` bytes of graphs; ends in a newline."""
        steps = (
            ("weights", self.weights), ("profile run", self.profile_run),
            (f"KV cache: {self.blocks:,} blocks, {self.blocks * self.block_tokens:,} tokens", self.kv_cache),
            ("graphs", captured),
        )  # fmt: skip
        rows, used = [("", "takes", "used", "free")], 0
        for name, size in steps:
            used += size
            rows.append((name, size_text(size), size_text(used), size_text(self.total - used)))
        rows.append(("margin, never taken", size_text(self.margin), "", ""))
        return "\n".join(table(rows, (1, 2, 3))) + "\n"

    def to_dict(self) -> dict[str, int]:
        """The division as JSON holds it."""
        return {
            "total": self.total, "weights": self.weights, "profile_run": self.profile_run, "free": self.free,
            "usable": self.usable, "margin": self.margin, "graphs": self.graphs, "kv_cache": self.kv_cache,
            "kv_blocks": self.blocks, "free_for_capture": self.free_for_capture,
        }  # fmt: skip


def profile(
    device: GraphDevice, plan: Plan, block_bytes: int, options: CaptureOptions, longest: int | None = None
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
