"""From a GGUF tensor's bytes to float32, or to its blocks.

    Q8_0 = scale:f16 (q:i8)*32
    Q4_0 = scale:f16 (lo:4 hi:4)*16
    Q4_1 = scale:f16 minimum:f16 (lo:4 hi:4)*16

The low half-bytes are weights 0–15 of the block and the high ones 16–31. Source: ggml's quants, and gguf-py's
`gguf.quants`, which dequantises the other types here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import FloatArray, QuantisedBlocks
from llmc.compiler.checkpoint.gguf_header import TensorInfo

_BLOCK = 32
BLOCK_FORMS = {
    "Q8_0": BlockForm("Q8_0", 8, _BLOCK, ""),
    "Q4_0": BlockForm("Q4_0", 4, _BLOCK, ""),
    "Q4_1": BlockForm("Q4_1", 4, _BLOCK, "minimums"),
}
"""The types whose blocks are kept as they are."""

Bytes = npt.NDArray[np.uint8]


def dequantise(info: TensorInfo, raw: Bytes) -> FloatArray:
    """Float32 values in `info.shape`; a read-only view for F32. Damaged scales may give non-finite values."""
    if info.type == "F32":
        return raw.view("<f4").reshape(info.shape)
    with np.errstate(all="ignore"):
        if info.type == "F16":
            return raw.view("<f2").astype(np.float32).reshape(info.shape)
        if info.type == "BF16":
            return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)
        if info.type in BLOCK_FORMS and len(info.shape) == 2:
            return split_blocks(info, raw).dequantise()
        import gguf

        rows = raw.reshape(-1, raw.size // int(np.prod(info.shape[:-1])))
        values: Any = gguf.dequantize(rows, gguf.GGMLQuantizationType[info.type])
        return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)


def split_blocks(info: TensorInfo, raw: Bytes) -> QuantisedBlocks:
    """The blocks of a matrix of one of BLOCK_FORMS."""
    rows, columns = info.shape
    blocks = raw.reshape(rows, columns // _BLOCK, -1)
    scale = _halves(blocks, 0)
    if info.type == "Q8_0":
        return QuantisedBlocks("Q8_0", 8, 128, blocks[..., 2:] ^ np.uint8(128), scale, None)
    minimum = _halves(blocks, 2) if info.type == "Q4_1" else None
    codes = blocks[..., 4 if info.type == "Q4_1" else 2 :]
    q = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
    return QuantisedBlocks(info.type, 4, 8 if minimum is None else 0, q, scale, minimum)


def _halves(blocks: Bytes, at: int) -> FloatArray:
    """The float16 at byte `at` of every block, as float32 [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)
