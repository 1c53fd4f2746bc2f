"""The reference of encoders: transformers' own model in float32, a text at a time, unpadded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.verification.encoding import Reference


def encoder_reference(checkpoint: Checkpoint, task: str, judges: tuple[int, int] | None) -> Reference:
    """(ids [T], segments [T]) → states [T, H], or logits [labels]. Raises CheckpointError."""
    import torch

    from llmc.compiler.frontend.encode import Encode

    model = Encode(checkpoint, task, judges)  # type: ignore[arg-type] # a Task by its caller

    def run(ids: NDArray[np.int64], types: NDArray[np.int64]) -> NDArray[np.float32]:
        segments = torch.from_numpy(types[None]) if model.typed else None
        with torch.no_grad():
            found: NDArray[np.float32] = model.unpadded(torch.from_numpy(ids[None]), segments)[0].float().numpy()
        return found

    return run
