"""awq: 4-bit weights with a scale and a zero point for each group of inputs, as AutoAWQ's GEMM stores them.

A matrix P.weight [N, K] is stored as

    P.qweight  int32 [K, N/8]    quantized weights along N
    P.qzeros   int32 [G, N/8]    zero points along N; G = K / group_size, or 1 for a group_size of -1
    P.scales   float [G, N]

A word holds eight neighbours along N; from its lowest bits on, those at 0, 2, 4, 6, 1, 3, 5, 7. The reference
multiplies in float16; here values are computed in float32.

Sources: AutoAWQ 0.2.9, modules/linear/gemm.py (WQLinear_GEMM) and utils/packing_utils.py; transformers 5.23,
utils/quantization_config.py (AwqConfig).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.checkpoint.base import FloatArray
from llmc.compiler.checkpoint.quantised.base import (
    DTYPES,
    Reading,
    StoredTensors,
    stated_group,
    stated_number,
)
from llmc.compiler.checkpoint.quantised.groups import WORD, GroupedTensor, QuantizedArray, unpack

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index among eight neighbours of each weight in a word."""
_BITS = 4
_QUANTIZED = ".qweight"
_LAYOUT = "gemm"


def read(stated: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's awq tensors."""
    layout = str(stated.get("version") or stated.get("format") or _LAYOUT).lower()
    if stated.get("backend") == "llm-awq":
        layout = "llm-awq"
    if layout != _LAYOUT:
        raise stored.error(
            f"quantization_config: awq version {layout!r:.60} is not supported; supported: {_LAYOUT}. Use a checkpoint "
            f"in {_LAYOUT}, or the unquantized one"
        )
    modules = [name.removesuffix(_QUANTIZED) for name in stored.names(_QUANTIZED)]
    if not modules:
        raise stored.error(f"quantization_config says awq, but no tensor ends with {_QUANTIZED}: fetch it again")
    return Reading({f"{module}.weight": _Matrix(stored, module, stated) for module in modules})


class _Matrix(GroupedTensor):
    def __init__(self, stored: StoredTensors, module: str, stated: Mapping[str, Any]) -> None:
        stated_number(stated, "bits", stored, (_BITS,))
        self.parts = self._quantized, self._zeros_at, self._scales_at = (
            f"{module}.qweight", f"{module}.qzeros", f"{module}.scales",
        )  # fmt: skip
        stored.require(self._quantized, self._quantized, ("I32",))
        packed = stored.matrix(self._quantized)
        width, rows = packed[0], packed[1] * WORD // _BITS
        groups = width // stated_group(stated.get("group_size"), stored, width, self._quantized)
        stored.require(self._quantized, self._scales_at, tuple(DTYPES), (groups, rows))
        stored.require(self._quantized, self._zeros_at, ("I32",), (groups, packed[1]))
        scales = stored.scales_of(self._scales_at)
        super().__init__(stored, f"{module}.weight", "awq", (rows, width), _BITS, groups, scales)

    def read_quantized(self) -> QuantizedArray:
        return np.ascontiguousarray(self._in_order(self._quantized).T)

    def read_scales(self) -> FloatArray:
        return self.stored.floats(self._scales_at).T

    def read_zeros(self) -> npt.NDArray[Any]:
        return self._in_order(self._zeros_at).T

    def _in_order(self, name: str) -> QuantizedArray:
        """Words [.., N/8] → weights [.., N]."""
        quantized = unpack(self.stored.quantized(name), _BITS, self.shape[0]).reshape(
            -1, self.shape[0] // len(ORDER), 8
        )
        built = np.empty_like(quantized)
        built[..., list(ORDER)] = quantized
        return built.reshape(len(quantized), -1)
