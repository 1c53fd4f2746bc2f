"""GB200, four to a tray."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "gb200", "NVIDIA GB200", (10, 0),
    cores=152, memory_bytes=197_897_748_480, bandwidth=7_928.06e9, l2_bytes=135_528_448, clock_ghz=2.062,
    bf16_flops=2_500e12, fp8_flops=5_000e12, link="NVLink 5, 1,800 GB/s a card", slices=(1, 2, 4),
    sources=(
        "openxla/xla, xla/backends/gpu/target_config/specs/gb200.txtpb (300ec95): all but the peaks and the link",
        "NVIDIA GB200 NVL72 datasheet: FLOP/s of one of 72 (without sparsity)",
    ),
)  # fmt: skip
