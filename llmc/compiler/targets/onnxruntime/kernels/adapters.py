"""Matrices of LoRA adapters that requests choose, as the kernels read them (source/adapted.c): a line for each rank.

Family `lora`, of one A [R, in] and of the B [out, R] of modules that are one above the other. Its parts are
  low      uint8 [R, in]: the signed codes of A's rows, up to whole vectors of LANES
  high     uint8 [R, out]: the same of B's columns
  scales   float32 [R]: what the product of a row's and a column's codes is multiplied by
Codes are symmetric, with a scale for each line (weights/rows.py), so that no adapter decides how another is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.kernels.panels import LANES
from llmc.compiler.weights.rows import codes, scales

if TYPE_CHECKING:
    from llmc.compiler.weights.recipes import TensorSource

Array = NDArray[np.float32]


def lora(names: Sequence[str], source: TensorSource, block: int) -> dict[str, NDArray[Any]]:
    """The parts of family lora."""
    del block
    low, *high = (source.tensor(name) for name in names)
    columns = np.concatenate(high).T
    each = scales(low, "int8"), scales(columns, "int8")
    return {"low": _lines(low, each[0]), "high": _lines(columns, each[1]), "scales": each[0] * each[1]}


def line(width: int) -> int:
    """Codes of a line of so many numbers."""
    return -(-width // LANES) * LANES


def _lines(matrix: Array, scale: Array) -> NDArray[np.uint8]:
    made = np.zeros((len(matrix), line(matrix.shape[1])), np.int8)
    made[:, : matrix.shape[1]] = codes(matrix, scale, "int8")
    return made.view(np.uint8)
