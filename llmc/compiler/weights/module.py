"""A loaded module's parameters as a checkpoint's tensors (weights/recipes.py, `TensorSource`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

    from llmc.compiler.checkpoint.base import QuantisedBlocks


class ModuleTensors:
    """By the names that a traced program has for them: without the "model." that frontend/encode.py's module puts
    before them."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {name.removeprefix("model."): tensor for name, tensor in module.state_dict().items()}

    def tensor_names(self) -> Sequence[str]:
        """Names of all."""
        return list(self._tensors)

    def tensor(self, name: str) -> NDArray[Any]:
        """One in float32."""
        found: NDArray[Any] = self._tensors[name].float().numpy()
        return found

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """None: transformers made them dense."""
        return None

    reordered_blocks = quantised_blocks
