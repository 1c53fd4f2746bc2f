"""From a GGUF tensor's bytes to float32, or to its blocks (gguf_types)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import FloatArray, QuantisedBlocks
from llmc.compiler.checkpoint.gguf_header import TensorInfo
from llmc.compiler.checkpoint.gguf_types import BLOCK_TYPES

Bytes = npt.NDArray[np.uint8]
_FLOATS = frozenset({"F32", "F16", "BF16"})


def dequantise(info: TensorInfo, raw: Bytes) -> FloatArray:
    """Float32 values in `info.shape`; a read-only view for F32. Damaged scales may give non-finite values."""
    if info.type == "F32":
        return raw.view("<f4").reshape(info.shape)
    if info.type == "F16":
        return raw.view("<f2").astype(np.float32).reshape(info.shape)
    if info.type == "BF16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)
    with np.errstate(all="ignore"):
        if info.type in BLOCK_TYPES:
            return split_blocks(info, raw).dequantise().reshape(info.shape)
        import gguf

        values: Any = gguf.dequantize(_rows(info, raw), gguf.GGMLQuantizationType[info.type])
        return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)


def block_form(info: TensorInfo) -> BlockForm | None:
    """The form of a matrix of one of BLOCK_TYPES; None of other types and of what is no matrix."""
    return BLOCK_TYPES[info.type].form if info.type in BLOCK_TYPES and len(info.shape) == 2 else None


def unkept(info: TensorInfo) -> str | None:
    """The type of a matrix in codes whose blocks are not kept; None of others."""
    return None if info.type in _FLOATS or info.type in BLOCK_TYPES or len(info.shape) != 2 else f"GGUF {info.type}"


def split_blocks(info: TensorInfo, raw: Bytes) -> QuantisedBlocks:
    """The blocks of a tensor of one of BLOCK_TYPES, its rows one above the other. Damaged scales may be non-finite."""
    kind = BLOCK_TYPES[info.type]
    form, rows = kind.form, _rows(info, raw)
    with np.errstate(invalid="ignore"):
        q, scale, minimum = kind.split(rows.reshape(len(rows), info.shape[-1] // kind.stored, -1))
    return QuantisedBlocks(
        form.type,
        form.bits,
        kind.zero,
        q.reshape(len(rows), -1, form.block),
        scale.reshape(len(rows), -1),
        None if minimum is None else minimum.reshape(len(rows), -1),
    )


def _rows(info: TensorInfo, raw: Bytes) -> Bytes:
    """[N, bytes of a row]"""
    return raw.reshape(-1, raw.size // int(np.prod(info.shape[:-1])))
