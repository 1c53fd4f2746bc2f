"""L40S 48 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "l40s", "NVIDIA L40S", (8, 9),
    cores=142, memory_bytes=47_576_711_168, bandwidth=864.1e9, l2_bytes=96 << 20, clock_ghz=2.52,
    bf16_flops=362.05e12, fp8_flops=733e12, link="PCIe 4 x16, 64 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "deviceQuery on a card, in cuda-device-query's README: all but the peaks and the link (9,001 MHz × 384 bits)",
        "NVIDIA L40S datasheet: FLOP/s (without sparsity)",
    ),
)  # fmt: skip
