"""What is known of a card, and of its architecture, as XLA's target configuration has it.

Limits of an architecture: CUDA C++ Programming Guide 13.0, "Compute Capabilities", tables of features and technical
specifications per compute capability (shared memory of a multiprocessor and, opted in, of a block; threads of a
multiprocessor) and of arithmetic instructions (32-bit floating-point additions a clock and multiprocessor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1 << 10


@dataclass(frozen=True)
class Architecture:
    """Limits of a multiprocessor and of a block of threads. Sizes in bytes."""

    shared_per_core: int
    shared_per_block: int
    threads_per_core: int
    fpus_per_core: int


_HOPPER = Architecture(228 * KIB, 227 * KIB, 2048, 128)
_ADA = Architecture(100 * KIB, 99 * KIB, 1536, 128)

ARCHITECTURES: Mapping[tuple[int, int], Architecture] = {
    (8, 0): Architecture(164 * KIB, 163 * KIB, 2048, 64),
    (8, 6): _ADA,
    (8, 9): _ADA,
    (9, 0): _HOPPER,
    (10, 0): _HOPPER,
    (10, 3): _HOPPER,
    (12, 0): _ADA,
}
"""By compute capability."""


@dataclass(frozen=True)
class Card:
    """One sort of card. Bytes, FLOP/s (dense, without sparsity) and bytes/s are of one."""

    name: str
    """As users write it."""
    product: str
    """As the driver names it, and JAX as `device_kind`."""
    compute_capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    memory_bytes: int
    """As the driver reports the total."""
    bandwidth: float
    l2_bytes: int
    clock_ghz: float
    """The highest clock of the multiprocessors."""
    bf16_flops: float
    fp8_flops: float
    """0 where the card has no such instructions."""
    link: str
    """How the cards of one host exchange data, in words."""
    slices: tuple[int, ...]
    """Cards of one host that graphs may be sharded over, as hosts are sold."""
    sources: tuple[str, ...]

    @property
    def capability(self) -> str:
        """As NVIDIA writes it: "9.0"."""
        return "{}.{}".format(*self.compute_capability)

    @property
    def architecture(self) -> Architecture:
        """Its limits."""
        return ARCHITECTURES[self.compute_capability]

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto as text (xla/stream_executor/device_description.proto).

        The compute capability has no feature extension here: XLA then takes the one that it takes on the card.
        cuDNN is the oldest that jax 0.10.2 runs with.
        """
        major, minor = self.compute_capability
        limits = self.architecture
        info = {
            "threads_per_block_limit": 1024, "threads_per_warp": 32,
            "shared_memory_per_block": 48 * KIB,
            "shared_memory_per_core": limits.shared_per_core,
            "shared_memory_per_block_optin": limits.shared_per_block,
            "threads_per_core_limit": limits.threads_per_core,
            "core_count": self.cores, "fpus_per_core": limits.fpus_per_core,
            "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
            "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
            "memory_bandwidth": int(self.bandwidth), "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz, "device_memory_size": self.memory_bytes,
        }  # fmt: skip
        fields = " ".join(f"{name}: {value}" for name, value in info.items())
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
            f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{self.product}"'
        )
