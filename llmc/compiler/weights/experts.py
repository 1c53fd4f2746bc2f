"""Tensors of experts [E, N, K]: what their recipes (recipes.py) make of each expert's matrix.

Family `experts`: `in_turn` is float32 [E, N, K] with the rows of an expert's first and second half in turn, as ONNX
Runtime's MoE takes a gate and what it lets through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import QuantisedBlocks
    from llmc.compiler.weights.recipes import TensorSource


@dataclass(frozen=True)
class OneExpert:
    """A source (recipes.py, TensorSource) whose tensor `name` is one expert's matrix [N, K]."""

    name: str
    matrix: NDArray[np.float32]

    def tensor_names(self) -> Sequence[str]:
        """The one."""
        return [self.name]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The matrix."""
        return self.matrix

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """No checkpoint format stores blocks of experts apart."""
        return None

    reordered_blocks = quantised_blocks


def each_expert(name: str, source: TensorSource) -> list[OneExpert]:
    """The experts of a tensor, in order."""
    return [OneExpert(f"{name}[{i}]", matrix) for i, matrix in enumerate(source.tensor(name))]


def experts(names: Sequence[str], source: TensorSource, block: int) -> Mapping[str, NDArray[Any]]:
    """The parts of family experts, of one tensor."""
    (name,) = names
    tensor = source.tensor(name)
    count, rows, width = tensor.shape
    return {"in_turn": tensor.reshape(count, 2, rows // 2, width).transpose(0, 2, 1, 3).reshape(tensor.shape)}
