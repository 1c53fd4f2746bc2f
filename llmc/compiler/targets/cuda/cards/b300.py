"""B300 SXM6 288 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "b300", "NVIDIA B300 SXM6 AC", (10, 3),
    cores=148, memory_bytes=275_040 << 20, bandwidth=7_936e9, l2_bytes=135_528_448, clock_ghz=2.032,
    bf16_flops=2_250e12, fp8_flops=4_500e12, link="NVLink 5, 1,800 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "openxla/xla, xla/backends/gpu/target_config/specs/b300.txtpb (4336d12): bandwidth and L2",
        "nvidia-smi 580.126 on a card, in public course notes of 2026-09-11: memory and clock",
        "a public reference of its caches (driver 580.126.09, CUDA 13.2): multiprocessors",
        "NVIDIA HGX B300 datasheet: FLOP/s of one of eight (without sparsity)",
    ),
)  # fmt: skip
