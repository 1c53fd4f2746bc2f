"""NVIDIA GPUs to compile for, as XLA's target configuration describes them, with the source of each figure.

Limits of an architecture: CUDA C++ Programming Guide 13.0, "Compute Capabilities", tables of features and technical
specifications per compute capability (shared memory of a multiprocessor and, opted in, of a block; threads of a
multiprocessor) and of arithmetic instructions (32-bit floating-point additions a clock and multiprocessor).

Some GPUs read 8-bit weights inside the matmul, without a 16-bit copy (`lacks_format`). Where Triton's emitter cannot
read a format, XLA writes the whole matrix out in bf16 before each matmul, which is slower than bf16 weights. Its rule
for float8 e4m3 is "at least Hopper" (openxla/xla, xla/service/gpu/triton_support.cc). jax 0.10.2 agrees: its matmuls
have no such copy from 9.0 on, and have one at 8.0 and 8.9. Every GPU converts an fp8 cache as attention reads it, with
or without instructions for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1 << 10


@dataclass(frozen=True)
class GpuArchitecture:
    """Limits of a multiprocessor and of a thread block. Sizes in bytes."""

    shared_per_core: int
    shared_per_block: int
    threads_per_core: int
    fpus_per_core: int


_HOPPER = GpuArchitecture(228 * KIB, 227 * KIB, 2048, 128)
_ADA = GpuArchitecture(100 * KIB, 99 * KIB, 1536, 128)

ARCHITECTURES: Mapping[tuple[int, int], GpuArchitecture] = {
    (8, 0): GpuArchitecture(164 * KIB, 163 * KIB, 2048, 64),
    (8, 6): _ADA,
    (8, 9): _ADA,
    (9, 0): _HOPPER,
    (10, 0): _HOPPER,
    (10, 3): _HOPPER,
    (12, 0): _ADA,
}
"""Architectures by compute capability."""


@dataclass(frozen=True)
class GpuSpec:
    """One GPU model. Bytes, FLOP/s (dense, without sparsity) and bytes/s are per GPU."""

    name: str
    """The name on the command line."""
    product: str
    """The driver's name, which is JAX's `device_kind`."""
    compute_capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    memory_bytes: int
    """Total memory as the driver reports it."""
    bandwidth: float
    l2_bytes: int
    clock_ghz: float
    """The highest multiprocessor clock."""
    bf16_flops: float
    fp8_flops: float
    """0 where the GPU has no such instructions."""
    link: str
    """How the GPUs of one host exchange data, in words."""
    slices: tuple[int, ...]
    """Numbers of GPUs in one host that graphs may be sharded over, as hosts are sold."""
    sources: tuple[str, ...]

    @property
    def capability(self) -> str:
        """The compute capability in NVIDIA's notation: "9.0"."""
        return "{}.{}".format(*self.compute_capability)

    @property
    def architecture(self) -> GpuArchitecture:
        return ARCHITECTURES[self.compute_capability]

    def target_config(self) -> str:
        """Return XLA's GpuTargetConfigProto as text (xla/stream_executor/device_description.proto).

        Without a feature extension of the compute capability, XLA uses the one of the GPU. The cuDNN version is the
        oldest that jax 0.10.2 runs with.
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


_XLA = "openxla/xla, xla/backends/gpu/target_config/specs"

GPUS = (
    GpuSpec(
        "a10g", "NVIDIA A10G", (8, 6),
        cores=80, memory_bytes=22_587 << 20, bandwidth=600.1e9, l2_bytes=6 << 20, clock_ghz=1.71,
        bf16_flops=70e12, fp8_flops=0.0, link="PCIe 4 x16, 64 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            "total_memory, multi_processor_count and L2_cache_size as torch 2.15 (CUDA 13) prints them, in public docs",
            "NVIDIA A10G datasheet: bandwidth, clock and FLOP/s (without sparsity)",
        ),
    ),
    GpuSpec(
        "a100", "NVIDIA A100-SXM4-80GB", (8, 0),
        cores=108, memory_bytes=85_100_068_864, bandwidth=2_039.04e9, l2_bytes=40 << 20, clock_ghz=1.41,
        bf16_flops=312e12, fp8_flops=0.0, link="NVLink 3, 600 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            f"{_XLA}/a100_sxm_80.txtpb (4336d12): all but the peaks and the link",
            "NVIDIA A100 datasheet: FLOP/s (without sparsity)",
        ),
    ),
    GpuSpec(
        "a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0),
        cores=108, memory_bytes=42_298_834_944, bandwidth=1_555.2e9, l2_bytes=40 << 20, clock_ghz=1.41,
        bf16_flops=312e12, fp8_flops=0.0, link="NVLink 3, 600 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            f"{_XLA}/a100_sxm_40.txtpb (4336d12): all but the peaks and the link",
            "memory: its model_str, as a GPU reported it",
            "NVIDIA A100 datasheet: FLOP/s (without sparsity)",
        ),
    ),
    GpuSpec(
        "l4", "NVIDIA L4", (8, 9),
        cores=58, memory_bytes=23_612_293_120, bandwidth=300.05e9, l2_bytes=48 << 20, clock_ghz=2.04,
        bf16_flops=121e12, fp8_flops=242.5e12, link="PCIe 4 x16, 64 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            "deviceQuery in public notes on CUDA 11.8: all but the peaks and the link (6,251 MHz × 192 bits)",
            "NVIDIA L4 datasheet: FLOP/s (without sparsity)",
        ),
    ),
    GpuSpec(
        "l40s", "NVIDIA L40S", (8, 9),
        cores=142, memory_bytes=47_576_711_168, bandwidth=864.1e9, l2_bytes=96 << 20, clock_ghz=2.52,
        bf16_flops=362.05e12, fp8_flops=733e12, link="PCIe 4 x16, 64 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            "deviceQuery in cuda-device-query's README: all but the peaks and the link (9,001 MHz × 384 bits)",
            "NVIDIA L40S datasheet: FLOP/s (without sparsity)",
        ),
    ),
    GpuSpec(
        "h100", "NVIDIA H100 80GB HBM3", (9, 0),
        cores=132, memory_bytes=84_942_979_072, bandwidth=3_352.32e9, l2_bytes=50 << 20, clock_ghz=1.98,
        bf16_flops=989.4e12, fp8_flops=1_978.9e12, link="NVLink 4, 900 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            f"{_XLA}/h100_sxm.txtpb (0774019): all but the peaks and the link",
            "NVIDIA H100 Tensor Core GPU Architecture (V1.04), table 2: FLOP/s (without sparsity)",
        ),
    ),
    GpuSpec(
        "h100-pcie", "NVIDIA H100 PCIe", (9, 0),
        cores=114, memory_bytes=84_942_979_072, bandwidth=2_039.04e9, l2_bytes=50 << 20, clock_ghz=1.755,
        bf16_flops=756e12, fp8_flops=1_513e12, link="PCIe 5 x16, 128 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            f"{_XLA}/h100_pcie.txtpb (4336d12): all but the peaks and the link",
            "NVIDIA H100 Tensor Core GPU Architecture (V1.04), table 2: FLOP/s (without sparsity)",
        ),
    ),
    GpuSpec(
        "h20", "NVIDIA H20", (9, 0),
        cores=78, memory_bytes=97_285 << 20, bandwidth=4_000e9, l2_bytes=60 << 20, clock_ghz=1.98,
        bf16_flops=148e12, fp8_flops=296e12, link="NVLink 4, 900 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            "torch's total_memory and multi_processor_count, in comments of a public linear-attention kernel",
            "NVIDIA HGX H20 datasheet: bandwidth, L2, clock and FLOP/s",
        ),
    ),
    GpuSpec(
        "h200", "NVIDIA H200", (9, 0),
        cores=132, memory_bytes=143_156 << 20, bandwidth=4_800e9, l2_bytes=60 << 20, clock_ghz=1.98,
        bf16_flops=989.4e12, fp8_flops=1_978.9e12, link="NVLink 4, 900 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            f"{_XLA}/h200.txtpb (4336d12): multiprocessors, bandwidth and clock",
            "total_memory and L2_cache_size as torch prints them, in comments of a public script",
            "NVIDIA H200 datasheet: FLOP/s (without sparsity)",
        ),
    ),
    GpuSpec(
        "b200", "NVIDIA B200", (10, 0),
        cores=148, memory_bytes=191_514_411_008, bandwidth=7_672.32e9, l2_bytes=132_644_864, clock_ghz=1.965,
        bf16_flops=2_250e12, fp8_flops=4_500e12, link="NVLink 5, 1,800 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            f"{_XLA}/b200.txtpb (300ec95): all but the peaks and the link",
            "NVIDIA HGX B200 datasheet: FLOP/s of one of eight (without sparsity)",
        ),
    ),
    GpuSpec(
        "gb200", "NVIDIA GB200", (10, 0),
        cores=152, memory_bytes=197_897_748_480, bandwidth=7_928.06e9, l2_bytes=135_528_448, clock_ghz=2.062,
        bf16_flops=2_500e12, fp8_flops=5_000e12, link="NVLink 5, 1,800 GB/s a GPU", slices=(1, 2, 4),
        sources=(
            f"{_XLA}/gb200.txtpb (300ec95): all but the peaks and the link",
            "NVIDIA GB200 NVL72 datasheet: FLOP/s of one of 72 (without sparsity)",
        ),
    ),
    GpuSpec(
        "b300", "NVIDIA B300 SXM6 AC", (10, 3),
        cores=148, memory_bytes=275_040 << 20, bandwidth=7_936e9, l2_bytes=135_528_448, clock_ghz=2.032,
        bf16_flops=2_250e12, fp8_flops=4_500e12, link="NVLink 5, 1,800 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            f"{_XLA}/b300.txtpb (4336d12): bandwidth and L2",
            "nvidia-smi 580.126 on a card, in public course notes of 2026-09-11: memory and clock",
            "a public reference of its caches (driver 580.126.09, CUDA 13.2): multiprocessors",
            "NVIDIA HGX B300 datasheet: FLOP/s of one of eight (without sparsity)",
        ),
    ),
    GpuSpec(
        "rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0),
        cores=188, memory_bytes=97_250 << 20, bandwidth=1_792e9, l2_bytes=128 << 20, clock_ghz=2.6,
        bf16_flops=503.8e12, fp8_flops=1_007.6e12, link="PCIe 5 x16, 128 GB/s a GPU", slices=(1, 2, 4, 8),
        sources=(
            f"{_XLA}/rtx6000pro.txtpb (4336d12): cores, bandwidth, L2 and clock",
            "total_memory as torch 2.7.1 prints it for the Server Edition, in public setup notes",
            "NVIDIA RTX Blackwell PRO GPU Architecture: FLOP/s (without sparsity)",
        ),
    ),
)  # fmt: skip
"""Sorted by generation, oldest first."""

NAMES = tuple(gpu.name for gpu in GPUS)


def gpu_of(name: str) -> GpuSpec | None:
    """Look up a GPU by name; None for an unknown one."""
    return next((gpu for gpu in GPUS if gpu.name == name), None)


READ_FROM: Mapping[str, tuple[int, int]] = {"int8": (8, 0), "fp8": (9, 0)}
"""The least compute capability whose matmuls read weights of each format directly."""


def lacks_format(gpu: GpuSpec, name: str) -> str:
    """Explain why `gpu` cannot read weights in format `name` of --quantize; "" where it can."""
    least = READ_FROM.get(name)
    if least is None or gpu.compute_capability >= least:
        return ""
    others = [other for other, needed in READ_FROM.items() if gpu.compute_capability >= needed] or ["none"]
    return (
        f"XLA reads such weights inside matmuls from compute capability {least[0]}.{least[1]} on, {gpu.name} has "
        f"{gpu.capability}: it would write each matrix out in bf16 first; choose --quantize {' or '.join(others)}"
    )
