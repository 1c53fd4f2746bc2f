"""Which attention a card computes: XLA's of plain operators, or our kernel (targets/xla/attention/)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.options import CompileOptions, Option
from llmc.compiler.targets.xla.formats import KV_CACHE_DTYPE
from llmc.compiler.targets.xla.target import LOWERING
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.compiler.program.stage import WeightlessDialect
    from llmc.compiler.targets.cuda.cards import Card

ATTENTION: Option[str] = Option(
    "attention", str, "plain",
    "Attention of steps: plain operators, which XLA fuses, or a kernel that reads a row's live tokens where they lie "
    "(Pallas for Triton; compiled here, never yet run on a card).",
    metavar="plain|pallas", choices=("plain", "pallas"),
)  # fmt: skip

DIALECTS: dict[str, WeightlessDialect] = {"plain": "two_part", "pallas": "read_only"}
"""The dialect that a model is traced in (frontend/attention.py)."""

FP8_FROM = (8, 9)
"""The least compute capability for which Triton converts float8 e4m3; XLA of jax 0.10.2 ends the process below it:
"Conversion from/to f8e4m3nv is only supported on compute capability >= 89"."""


def require_kernel(options: CompileOptions, card: Card) -> None:
    """Raise InputError where the kernel is asked for and cannot be in the bundle."""
    if ATTENTION.of(options) == "plain":
        return
    if LOWERING.of(options) != "jax":
        raise InputError(f"{ATTENTION.flag} pallas works with --lowering jax; leave one of them out")
    if KV_CACHE_DTYPE.of(options) == "fp8" and card.compute_capability < FP8_FROM:
        raise InputError(
            f"{ATTENTION.flag} pallas with {KV_CACHE_DTYPE.flag} fp8 needs compute capability 8.9, {card.name} has "
            f"{card.capability}; leave one of them out"
        )
