"""H20 96 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "h20", "NVIDIA H20", (9, 0),
    cores=78, memory_bytes=97_285 << 20, bandwidth=4_000e9, l2_bytes=60 << 20, clock_ghz=1.98,
    bf16_flops=148e12, fp8_flops=296e12, link="NVLink 4, 900 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "total_memory and multi_processor_count as torch prints them, in comments of a public linear-attention kernel",
        "NVIDIA HGX H20 datasheet: bandwidth, L2, clock and FLOP/s",
    ),
)  # fmt: skip
