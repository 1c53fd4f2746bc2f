"""L4 24 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "l4", "NVIDIA L4", (8, 9),
    cores=58, memory_bytes=23_612_293_120, bandwidth=300.05e9, l2_bytes=48 << 20, clock_ghz=2.04,
    bf16_flops=121e12, fp8_flops=242.5e12, link="PCIe 4 x16, 64 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "deviceQuery on a card, in public notes on CUDA 11.8: all but the peaks and the link (6,251 MHz × 192 bits)",
        "NVIDIA L4 datasheet: FLOP/s (without sparsity)",
    ),
)  # fmt: skip
