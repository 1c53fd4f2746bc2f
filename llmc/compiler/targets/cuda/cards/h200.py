"""H200 SXM5 141 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "h200", "NVIDIA H200", (9, 0),
    cores=132, memory_bytes=143_156 << 20, bandwidth=4_800e9, l2_bytes=60 << 20, clock_ghz=1.98,
    bf16_flops=989.4e12, fp8_flops=1_978.9e12, link="NVLink 4, 900 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "openxla/xla, xla/backends/gpu/target_config/specs/h200.txtpb (4336d12): multiprocessors, bandwidth and clock",
        "total_memory and L2_cache_size as torch prints them, in comments of a public script",
        "NVIDIA H200 datasheet: FLOP/s (without sparsity)",
    ),
)  # fmt: skip
