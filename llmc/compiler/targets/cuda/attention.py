"""Which attention a card computes: XLA's of plain operators, or our kernel (targets/xla/attention/)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.options import Option

if TYPE_CHECKING:
    from llmc.compiler.program.stage import WeightlessDialect

ATTENTION: Option[str] = Option(
    "attention", str, "plain",
    "Attention of steps: plain operators, which XLA fuses, or a kernel that reads a row's live tokens where they lie "
    "(Pallas for Triton; compiled here, never yet run on a card).",
    metavar="plain|pallas", choices=("plain", "pallas"),
)  # fmt: skip

DIALECTS: dict[str, WeightlessDialect] = {"plain": "two_part", "pallas": "read_only"}
"""The dialect that a model is traced in (frontend/attention.py)."""
