"""H100 SXM5 80 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "h100", "NVIDIA H100 80GB HBM3", (9, 0),
    cores=132, memory_bytes=84_942_979_072, bandwidth=3_352.32e9, l2_bytes=50 << 20, clock_ghz=1.98,
    bf16_flops=989.4e12, fp8_flops=1_978.9e12, link="NVLink 4, 900 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "openxla/xla, xla/backends/gpu/target_config/specs/h100_sxm.txtpb (0774019): all but the peaks and the link",
        "NVIDIA H100 Tensor Core GPU Architecture (V1.04), table 2: FLOP/s (without sparsity)",
    ),
)  # fmt: skip
