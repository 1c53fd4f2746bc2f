"""RTX PRO 6000 Blackwell Workstation Edition 96 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0),
    cores=188, memory_bytes=97_250 << 20, bandwidth=1_792e9, l2_bytes=128 << 20, clock_ghz=2.6,
    bf16_flops=503.8e12, fp8_flops=1_007.6e12, link="PCIe 5 x16, 128 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "openxla/xla, xla/backends/gpu/target_config/specs/rtx6000pro.txtpb (4336d12): cores, bandwidth, L2 and clock",
        "total_memory as torch 2.7.1 prints it for the Server Edition, in public setup notes",
        "NVIDIA RTX Blackwell PRO GPU Architecture: FLOP/s (without sparsity)",
    ),
)  # fmt: skip
