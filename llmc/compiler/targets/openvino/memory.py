"""What OpenVINO's executables take on a CPU beside the cache, as benchmarks/graph_memory.py measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.size import ModelSize

LAYER_BYTES = 620_000
"""Of graph and kernels for each layer, beside the packed copy of the weights."""
LIVE = {True: 1.27, False: 2.08}
"""Times what lives at once in the widest layer, by whether weights are quantised: what their products take is codes."""


def model_bytes(model: ModelSize) -> int:
    """Of an open executable without its weights."""
    return model.layers * LAYER_BYTES


def activation_bytes(model: ModelSize, tokens: int, quantised: bool) -> int:
    """Of a step of so many new tokens."""
    return int(LIVE[quantised] * 4 * model.working_set * tokens)
