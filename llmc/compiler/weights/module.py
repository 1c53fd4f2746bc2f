"""Parameters of a loaded module, read like a checkpoint's tensors (weights/recipes.py, `TensorSource`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

    from llmc.compiler.checkpoint.base import QuantisedBlocks


class ModuleTensors:
    """Tensors by their names in the traced program. These lack the "model." that the wrapping module of
    frontend/encode.py adds."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {name.removeprefix("model."): tensor for name, tensor in module.state_dict().items()}

    def tensor_names(self) -> Sequence[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def tensor(self, name: str) -> NDArray[Any]:
        """One tensor in float32."""
        found: NDArray[Any] = self._tensors[name].float().numpy()
        return found

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """None: transformers has dequantized all tensors."""
        return None

    reordered_blocks = quantised_blocks
