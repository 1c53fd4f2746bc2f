"""The families of weight transforms that OpenVINO's decompression takes (see lowering/recipes.py, FAMILIES).

i8_data      int8 [N, K], or [N, K/group, group]: round(w / scale), −127 … 127
i8_scales    float32 [N, 1], or [N, K/group, 1]: largest magnitude of the row or group / 127; where that is 0, 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lowering.recipes import TensorSource


def i8(names: Sequence[str], source: TensorSource, group: int) -> dict[str, NDArray[Any]]:
    """The parts of family i8; `group` 0 is a scale for each row."""
    weight = np.concatenate([source.tensor(n) for n in names])
    rows, width = weight.shape
    grouped = weight.reshape(rows, width // group, group) if group else weight
    scale = np.abs(grouped).max(-1, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1
    data = np.clip(np.rint(grouped / scale), -127, 127).astype(np.int8)
    return {"data": data, "scales": scale}
