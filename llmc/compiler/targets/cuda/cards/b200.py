"""B200 SXM6 180 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "b200", "NVIDIA B200", (10, 0),
    cores=148, memory_bytes=191_514_411_008, bandwidth=7_672.32e9, l2_bytes=132_644_864, clock_ghz=1.965,
    bf16_flops=2_250e12, fp8_flops=4_500e12, link="NVLink 5, 1,800 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "openxla/xla, xla/backends/gpu/target_config/specs/b200.txtpb (300ec95): all but the peaks and the link",
        "NVIDIA HGX B200 datasheet: FLOP/s of one of eight (without sparsity)",
    ),
)  # fmt: skip
