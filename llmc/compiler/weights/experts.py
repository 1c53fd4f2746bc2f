"""Tensors of experts [E, N, K]: apply a recipe (recipes.py) to the matrix of each expert.

Family `experts`: `in_turn` is float32 [E, N, K] with the rows of an expert's first and second half interleaved, as ONNX
Runtime's MoE operator takes gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import QuantisedBlocks
    from llmc.compiler.weights.recipes import TensorSource


@dataclass(frozen=True)
class OneExpert:
    """A source (recipes.py, TensorSource) with one tensor `name`: one expert's matrix [N, K], dense or in blocks."""

    name: str
    matrix: NDArray[np.float32] | None
    blocks: QuantisedBlocks | None = None

    def tensor_names(self) -> Sequence[str]:
        """The single name."""
        return [self.name]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The matrix [N, K], dequantized if it is stored in blocks."""
        if self.matrix is not None:
            return self.matrix
        assert self.blocks is not None
        return self.blocks.dequantise()

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """The blocks, or None for a dense matrix."""
        return self.blocks

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        """None: experts keep the order of their inputs."""
        return None


def each_expert(name: str, source: TensorSource, *, turned: bool = False) -> Iterator[OneExpert]:
    """Yield the experts of a tensor in order. `turned`: the tensor is [E, K, N] and dense experts are transposed; its
    blocks are of matrices [N, K] already."""
    blocks = source.quantised_blocks(name)
    if blocks is None:
        for i, matrix in enumerate(source.tensor(name)):
            yield OneExpert(f"{name}[{i}]", matrix.T if turned else matrix)
        return
    for i, one in enumerate(blocks.apart()):
        yield OneExpert(f"{name}[{i}]", None, one)


def experts(names: Sequence[str], source: TensorSource, block: int) -> Mapping[str, NDArray[Any]]:
    """Build the parts of family `experts` from one tensor."""
    (name,) = names
    tensor = source.tensor(name)
    count, rows, width = tensor.shape
    return {"in_turn": tensor.reshape(count, 2, rows // 2, width).transpose(0, 2, 1, 3).reshape(tensor.shape)}
