"""H100 PCIe 80 GB."""

from llmc.compiler.targets.cuda.cards.base import Card

CARD = Card(
    "h100-pcie", "NVIDIA H100 PCIe", (9, 0),
    cores=114, memory_bytes=84_942_979_072, bandwidth=2_039.04e9, l2_bytes=50 << 20, clock_ghz=1.755,
    bf16_flops=756e12, fp8_flops=1_513e12, link="PCIe 5 x16, 128 GB/s a card", slices=(1, 2, 4, 8),
    sources=(
        "openxla/xla, xla/backends/gpu/target_config/specs/h100_pcie.txtpb (4336d12): all but the peaks and the link",
        "NVIDIA H100 Tensor Core GPU Architecture (V1.04), table 2: FLOP/s (without sparsity)",
    ),
)  # fmt: skip
