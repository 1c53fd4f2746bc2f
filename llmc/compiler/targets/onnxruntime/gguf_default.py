"""The default of --quantize for a GGUF file in blocks, with llmc's kernels: its own blocks.

They hold the model as the file has it, in no more bytes than int8, and most types in fewer. Measured of SmolLM2-135M in
Q4_1 (benchmarks/RESULTS.md), over int8: mean KL 0.0044, not 0.0065; decode steps of one sequence take 0.67 to 0.86 of
the time, prompts of 512 tokens 1.01 to 1.16. Checkpoints in other codes (gptq, awq …) were not measured so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.size import Weights

KEPT = (
    "quantize keep: a GGUF's own blocks decode in 0.67 of int8's time and are nearer to the model (mean KL 0.0044, not "
    "0.0065; SmolLM2 in Q4_1)"
)
"""Why, for summaries and manifests."""

LOOSE = 0.01
"""The most that norms, biases and routers are of a model's weights."""


def in_gguf_blocks(weights: Sequence[Weights]) -> bool:
    """Whether a GGUF file holds all matrices of the model in blocks that are kept."""
    from llmc.compiler.checkpoint.gguf_types import BLOCK_TYPES

    held = sum(one.count for one in weights if one.stored is not None and one.stored.type in BLOCK_TYPES)
    return held > (1 - LOOSE) * sum(one.count for one in weights)
