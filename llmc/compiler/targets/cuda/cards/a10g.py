"""A10G, of AWS's G5 machines."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "a10g", "NVIDIA A10G", (8, 6),
    cores=80, memory_bytes=22_587 << 20, bandwidth=600.1e9, l2_bytes=6 << 20, clock_ghz=1.71,
    bf16_flops=70e12, fp8_flops=0.0, link="PCIe 4 x16, 64 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "total_memory, multi_processor_count and L2_cache_size as torch 2.15 (CUDA 13) prints them, in public docs",
        "NVIDIA A10G datasheet: bandwidth, clock and FLOP/s (without sparsity)",
    ),
)  # fmt: skip
