"""mxfp4: expert tensors in MXFP4.

A tensor NAME [E, K, N] is stored as NAME_blocks [E, N, K/32, 16] and NAME_scales [E, N, K/32], both bytes. A byte of a
block holds two 4-bit values (E2M1), the first in its low half; a scale s multiplies its 32 values by 2 ** (s - 127)
(E8M0; 255 is NaN). Every value is exact in float32. Twice a 4-bit value is an integer, and blocks hold these integers
for the transposed matrices. A folder without such tensors is read as unquantized.

Sources: OCP Microscaling Formats specification 1.0, sections 5.3.3 and 5.4.1; names and dimension order: transformers
5.23, integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import FloatArray, QuantisedBlocks, require_finite
from llmc.compiler.checkpoint.quantised.base import QuantisedTensor, Reading, StoredTensors
from llmc.compiler.checkpoint.quantised.small_floats import E2M1_VALUES, E8M0_BIAS, E8M0_NO_NUMBER, low_and_high
from llmc.errors import CheckpointError

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16
FORM = BlockForm("mxfp4", 8, 2 * _BYTES, "", "bfloat16", stored_bits=4, table="float4", turned=True)


def read(stated: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's mxfp4 tensors."""
    names = [name.removesuffix(_BLOCKS) for name in stored.names(_BLOCKS)]
    return Reading({name: _Experts(stored, name) for name in names})


class _Experts(QuantisedTensor):
    def __init__(self, stored: StoredTensors, name: str) -> None:
        self._stored, self._name = stored, name
        self.parts = (name + _BLOCKS, name + _SCALES)
        for part in self.parts:
            stored.require(name + _BLOCKS, part, ("U8",))
        blocks, scales = (stored.shape(part) for part in self.parts)
        if len(blocks) != 4 or blocks[3] != _BYTES or blocks[:3] != scales:
            raise stored.error(
                f"{name}{_BLOCKS} is {list(blocks)} and {name}{_SCALES} {list(scales)}, not [E, N, G, {_BYTES}] and "
                "[E, N, G] as MXFP4 is stored: fetch the checkpoint again"
            )
        experts, rows, groups, _ = blocks
        self.shape = (experts, groups * 2 * _BYTES, rows)

    def values(self) -> FloatArray:
        built: FloatArray = np.empty(self.shape, np.float32)
        for matrix, blocks in zip(built, self.reordered_blocks().apart(), strict=True):
            matrix[...] = blocks.dequantise().T
        return built

    def unkept(self) -> str | None:
        """Devices support matmuls with the transposed order only, if any."""
        return "mxfp4"

    def reordered_form(self) -> BlockForm:
        return FORM

    def reordered_blocks(self) -> QuantisedBlocks:
        """[E · N, K], with half of each scale."""
        quantized, exponents = (self._stored.quantized(part) for part in self.parts)
        experts, _, rows = self.shape
        scales = exponents.reshape(experts * rows, -1)
        return blocks_of(low_and_high(quantized), scales, experts, self._name, self._stored.path)


def blocks_of(
    quantized: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8], experts: int, name: str, path: Path
) -> QuantisedBlocks:
    """Blocks of 4-bit values [rows, …] and scales [rows, K/32], rows of all experts one after another. Raises
    CheckpointError, naming the tensor and its file, for a value that is not finite."""
    if exponents.size and exponents.max() == E8M0_NO_NUMBER:
        raise CheckpointError(f"{path}: {name} holds a scale of {E8M0_NO_NUMBER}, which is NaN: fetch it again")
    scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - (E8M0_BIAS + 1))
    q = E2M1_VALUES[quantized].reshape(*scale.shape, FORM.block)
    with np.errstate(over="ignore"):
        extremes = np.stack([q.min(-1), q.max(-1)]).astype(np.float32) - 128
        extremes *= scale
    require_finite(extremes, name, path)
    return QuantisedBlocks(FORM.type, FORM.bits, 128, q, scale, None, experts)
