"""A100 SXM4 40 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0),
    cores=108, memory_bytes=42_298_834_944, bandwidth=1_555.2e9, l2_bytes=40 << 20, clock_ghz=1.41,
    bf16_flops=312e12, fp8_flops=0.0, link="NVLink 3, 600 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "openxla/xla, xla/backends/gpu/target_config/specs/a100_sxm_40.txtpb (4336d12): all but the peaks and the link",
        "memory: its model_str, what a card was asked",
        "NVIDIA A100 datasheet: FLOP/s (without sparsity)",
    ),
)  # fmt: skip
