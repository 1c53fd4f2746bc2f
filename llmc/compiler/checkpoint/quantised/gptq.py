"""gptq: weights of 2, 3, 4 or 8 bits with a scale and a zero point for each group of inputs.

A matrix P.weight [N, K] is stored as

    P.qweight  int32 [K · bits/32, N]    quantized weights along K (groups.py)
    P.scales   float [G, N]              G = K / group_size, or 1 for a group_size of -1
    P.qzeros   int32 [G, N · bits/32]    zero points along N; "gptq" (version 1) stores them minus one
    P.g_idx    int32 [K]                 the group of each input; without it, groups are consecutive

Version 1 adds the one to whole words, which restores what a zero point of 0 borrowed from its neighbour; with 3 bits it
adds one to each zero point. `desc_act` (act-order) assigns inputs to groups in any order, by g_idx. `dynamic` states
other bits or groups for modules whose names match (GPTQModel). The reference multiplies in the dtype of the scales,
mostly float16; here values are computed in float32.

Sources: GPTQModel, nn_modules/qlinear/__init__.py (PackableQuantLinear.pack, dequantize_weight) and utils/model.py
(convert_gptq_v1_to_v2_format_module); transformers 5.23, utils/quantization_config.py (GPTQConfig).
"""

from __future__ import annotations

import re
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
from llmc.compiler.checkpoint.quantised.groups import (
    WORD,
    GroupedTensor,
    Order,
    QuantizedArray,
    order_in,
    unpack,
    words_of,
)

BITS = (2, 3, 4, 8)
_ONE, _TWO = "gptq", "gptq_v2"
_QUANTIZED = ".qweight"


def read(stated: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's gptq tensors."""
    layout = stated.get("checkpoint_format") or stated.get("format") or _ONE
    if layout not in (_ONE, _TWO):
        raise stored.error(
            f"quantization_config: gptq format {layout!r:.60} is not supported; supported: {_ONE}, {_TWO}. Convert it "
            "with GPTQModel, or use the unquantized checkpoint"
        )
    modules = [name.removesuffix(_QUANTIZED) for name in stored.names(_QUANTIZED)]
    if not modules:
        raise stored.error(f"quantization_config says gptq, but no tensor ends with {_QUANTIZED}: fetch it again")
    return Reading({f"{m}.weight": _Matrix(stored, m, _stated_for(m, stated, stored), layout == _ONE) for m in modules})


def _stated_for(module: str, stated: Mapping[str, Any], stored: StoredTensors) -> Mapping[str, Any]:
    """The settings of a module: the first matching entry of `dynamic` overrides the general ones."""
    dynamic = stated.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(own, Mapping) for own in dynamic.values()):
        raise stored.error(f"quantization_config: dynamic is {dynamic!r:.60}, not objects by pattern: fetch it again")
    for pattern, own in dynamic.items():
        try:
            found = re.match(pattern.removeprefix("-:").removeprefix("+:"), module)
        except re.error as error:
            raise stored.error(f"quantization_config: dynamic has {pattern!r:.60}: {error}; fetch it again") from error
        if found and pattern.startswith("-:"):
            raise stored.error(f"{module}{_QUANTIZED} is quantized, but dynamic says {pattern!r:.60}: fetch it again")
        if found:
            return {**stated, **own}
    return stated


class _Matrix(GroupedTensor):
    def __init__(self, stored: StoredTensors, module: str, stated: Mapping[str, Any], less_one: bool) -> None:
        bits = stated_number(stated, "bits", stored, BITS)
        self._quantized, self._zeros_at, self._scales_at, self._order_at = (
            f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")
        )
        self._less_one = less_one
        stored.require(self._quantized, self._quantized, ("I32",))
        packed = stored.shape(self._quantized)
        if len(packed) != 2 or 0 in packed or packed[0] * WORD % bits:
            raise stored.error(
                f"tensor {self._quantized} is {list(packed)}, which does not fit a matrix of {bits} bits"
            )
        width, rows = packed[0] * WORD // bits, packed[1]
        groups = width // stated_group(stated.get("group_size"), stored, width, self._quantized)
        stored.require(self._quantized, self._scales_at, tuple(DTYPES), (groups, rows))
        stored.require(self._quantized, self._zeros_at, ("I32",), (groups, words_of(rows, bits)))
        ordered = self._order_at in stored
        if ordered or stated.get("desc_act"):
            stored.require(self._quantized, self._order_at, ("I32", "I64"), (width,))
        self.parts = (self._quantized, self._zeros_at, self._scales_at, *([self._order_at] if ordered else []))
        scales = stored.scales_of(self._scales_at)
        super().__init__(stored, f"{module}.weight", "gptq", (rows, width), bits, groups, scales)

    def read_quantized(self) -> QuantizedArray:
        return unpack(self.stored.quantized(self._quantized).T, self.bits, self.shape[1])

    def read_scales(self) -> FloatArray:
        return self.stored.floats(self._scales_at).T

    def read_zeros(self) -> npt.NDArray[Any]:
        words, rows = self.stored.quantized(self._zeros_at).view(np.uint32), self.shape[0]
        if self._less_one and not WORD % self.bits:
            words = words + np.uint32(sum(1 << at for at in range(0, WORD, self.bits)))
        zeros = unpack(words, self.bits, rows)
        if self._less_one and WORD % self.bits:
            zeros = (zeros + np.uint8(1)) & np.uint8((1 << self.bits) - 1)
        return zeros.T

    def read_order(self) -> Order | None:
        return order_in(self.stored, self._order_at, self.shape[1], self.groups)
