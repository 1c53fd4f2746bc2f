"""A100 SXM4 80 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "a100", "NVIDIA A100-SXM4-80GB", (8, 0),
    cores=108, memory_bytes=85_100_068_864, bandwidth=2_039.04e9, l2_bytes=40 << 20, clock_ghz=1.41,
    bf16_flops=312e12, fp8_flops=0.0, link="NVLink 3, 600 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "openxla/xla, xla/backends/gpu/target_config/specs/a100_sxm_80.txtpb (4336d12): all but the peaks and the link",
        "NVIDIA A100 datasheet: FLOP/s (without sparsity)",
    ),
)  # fmt: skip
