"""What ONNX Runtime's sessions take beside weights and cache, as benchmarks/graph_memory.py measures it.

Sessions share one arena, which grows to what the largest step takes and stays so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.targets.onnxruntime.options import BF16, INT8

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.size import ModelSize

SESSION_LAYER_BYTES = {True: 100_000, False: 80_000}
"""Of graph objects for each layer, by whether weights are quantised."""
ARENA = 3.65
"""Times what lives at once in the widest layer: 2 where blocks of one size do not fit where another one was, and the
rest is the block that ONNX Runtime's memory patterns take from the second run of a shape on."""
SCRATCH = {INT8: 1.25, BF16: 2.0}
"""Bytes for each value that a product of llmc's kernels takes, by what prompts are computed in: its code and a share of
its block's sums, or the rounded value. They are outputs of the operator, so all layers' are kept until a step ends."""


def session_bytes(model: ModelSize, quantised: bool) -> int:
    """Of one session, whatever its shape."""
    return model.layers * SESSION_LAYER_BYTES[quantised]


def arena_bytes(model: ModelSize, tokens: int) -> int:
    """Of a step of so many new tokens, by ONNX Runtime's own operators."""
    return int(ARENA * 4 * model.working_set * tokens)


def kernels_arena_bytes(model: ModelSize, tokens: int, prompts: str = INT8) -> int:
    """The same by llmc's, which fuse what lies between two products. `prompts`: what those are computed in."""
    taken = 2 * model.hidden + model.heads * model.head_dim + model.intermediate
    live = model.intermediate + 4 * model.hidden
    return int((4 * live + SCRATCH[prompts] * model.layers * taken) * tokens)
