"""Matrices in blocks of 4 or 8 bits, as ONNX Runtime's MatMulNBits and GatherBlockQuantized read them.

All families here use w ≈ scale · (q − 2^(bits − 1)) + offset. Each `block` neighbours along the input axis share one
scale, and in some families one offset. Parts of a family (see recipes.py, FAMILIES):
  data       uint8 [N, K/block, block · bits/8]; of two 4-bit weights in a byte, the first is in the low half
  rows       the same bytes as [N, K · bits/8], for row look-ups
  scales     float32 [N, K/block]
  offsets    float32 [N, K/block]
  columns    the offsets as [K/block, N]

q4       4 bits with offsets, quantized here; a checkpoint's 4-bit blocks are kept exactly
kept4    the checkpoint's own 4-bit blocks (GGUF Q4_0, Q4_1 and Q2_K to Q4_K, gptq, awq), exactly
kept6    the checkpoint's own blocks of at most 6 bits (GGUF Q5_0, Q5_1, Q5_K, Q6_K), exactly; llmc's kernels only
kept8    the checkpoint's own blocks in 8 bits, exactly: 4-bit weights times 16, scales over 16; a tensor without
         blocks by the rule of family q8

A checkpoint's block may be larger than `block`, which has to divide it. Neighbouring blocks then have equal scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.weights.recipes import TensorSource, quantise_q8
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import QuantisedBlocks

Array = NDArray[np.float32]
QuantizedArray = NDArray[np.uint8]
_CHUNK_ROWS = 4096
_TOP = 15
_MARGIN = 0.05
_REFITS = 2


Blocks = tuple[QuantizedArray, Array, Array]
"""Quantized weights uint8 [N, K/block, block], one per byte; scales and offsets float32 [N, K/block]."""


def q4(names: Sequence[str], source: TensorSource, block: int) -> dict[str, NDArray[Any]]:
    """Build the parts of family q4."""
    return _parts(4, q4_blocks(names, source, block))


def q4_blocks(names: Sequence[str], source: TensorSource, block: int) -> Blocks:
    """Build the matrix of family q4."""
    built = []
    for name in names:
        stored = source.quantised_blocks(name)
        own = stored is None or stored.bits != 4 or stored.block % block
        built.append(quantise_q4(source.tensor(name), block) if own or stored is None else _centred(stored.cut(block)))
    return _stacked(built)


def q4_values(names: Sequence[str], source: TensorSource, block: int) -> Array:
    """The dequantized matrix [N, K] of family q4, whose rows are whole blocks."""
    quantized, scales, offsets = q4_blocks(names, source, block)
    values: Array = (quantized.astype(np.float32) - 8) * scales[..., None] + offsets[..., None]
    return values.reshape(len(values), -1)


def kept4(names: Sequence[str], source: TensorSource, block: int) -> dict[str, NDArray[Any]]:
    """Build the parts of family kept4. Raises CheckpointError for a source without 4-bit blocks of this size."""
    return _parts(4, kept4_blocks(names, source, block))


def kept4_blocks(names: Sequence[str], source: TensorSource, block: int, *, low: bool = False) -> Blocks:
    """Build the matrix of family kept4. `low`: blocks with minimums count from 0, not from mid-range."""
    built = []
    for name in names:
        stored = source.quantised_blocks(name)
        if stored is None or stored.bits != 4:
            raise changed(name, "4-bit blocks", block)
        built.append(_centred(_cut(name, stored, block, low)))
    return _stacked(built)


def kept6_blocks(names: Sequence[str], source: TensorSource, block: int) -> Blocks:
    """Build the matrix of family kept6. Blocks with minimums count from 0."""
    middle, built = 32, []
    for name in names:
        stored = source.quantised_blocks(name)
        if stored is None:
            raise changed(name, "6-bit blocks", block)
        cut = _cut(name, stored, block, low=True)
        moved = cut.q.astype(np.int16) + ((0 if cut.minimum is not None else middle) - np.int16(cut.zero_point))
        if moved.min() < 0 or moved.max() >= 2 * middle:
            raise changed(name, "6-bit blocks", block)
        none = np.zeros_like(cut.scale)
        built.append(
            (moved.astype(np.uint8), cut.scale, none if cut.minimum is None else cut.minimum + middle * cut.scale)
        )
    return _stacked(built)


def kept8(names: Sequence[str], source: TensorSource, block: int) -> dict[str, NDArray[Any]]:
    """Build the parts of family kept8."""
    return _parts(8, kept8_blocks(names, source, block))


def kept8_blocks(
    names: Sequence[str], source: TensorSource, block: int, held: Callable[[Array], Array] = np.asarray, *,
    low: bool = False,
) -> Blocks:  # fmt: skip
    """Build the matrix of family kept8. `held` rounds the scales of matrices that are quantized here to their stored
    dtype. `low`: as in `kept4_blocks`."""
    built = []
    for name in names:
        stored = source.quantised_blocks(name)
        if stored is None:
            quantized, scales = quantise_q8(source.tensor(name), block, held)
            built.append((quantized, scales, np.zeros_like(scales)))
        else:
            quantized, scales, offsets = _centred(_cut(name, stored, block, low))
            wider = np.uint8(1 << (8 - stored.bits))
            built.append((quantized * wider, scales / np.float32(wider), offsets))
    return _stacked(built)


def quantise_q4(weight: Array, block: int, importance: Array | None = None) -> Blocks:
    """Quantize [N, K] blockwise to 4 bits with offsets.

    Returns quantized weights uint8 [N, K/block, block], and scales and offsets float32 [N, K/block]. K is padded with
    zeros to a multiple of `block`. `importance` [K] weights the squared error of each column and requires whole blocks;
    by default all columns count alike.

    The search starts from the block's own range and from a range that is a tenth narrower. It rounds, and refits scale
    and offset by least squares, _REFITS times; the better result wins. The squared error is 27% less than with rounding
    between the extremes (benchmarks/RESULTS.md).
    """
    rows, width = weight.shape
    blocks = -(-width // block)
    if blocks * block != width:
        weight = np.pad(weight, ((0, 0), (0, blocks * block - width)))
    w = weight.reshape(rows, blocks, block)
    counts = np.ones((blocks, block), np.float32) if importance is None else importance.reshape(blocks, block)
    parts = [_quantise_rows(w[at : at + _CHUNK_ROWS], counts) for at in range(0, rows, _CHUNK_ROWS)]
    quantized, scales, offsets = (np.concatenate(p) for p in zip(*parts, strict=True))
    return quantized, scales, offsets


def _quantise_rows(w: Array, counts: Array) -> tuple[QuantizedArray, Array, Array]:
    low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
    best = _fitted(w, low, (high - low) / np.float32(_TOP), counts)
    margin = (high - low) * np.float32(_MARGIN)
    other = _fitted(w, low + margin, (high - low - 2 * margin) / np.float32(_TOP), counts)
    better = other[0] < best[0]
    _, quantized, scale, start = (np.where(better, new, old) for new, old in zip(other, best, strict=True))
    return quantized.astype(np.uint8), scale[..., 0], (start + np.float32(8) * scale)[..., 0]


def _fitted(w: Array, start: Array, scale: Array, counts: Array) -> tuple[Array, Array, Array, Array]:
    """Fit w ≈ scale · q + start; `counts` [K/block, block] weights the squared error. Returns the squared error, q,
    scale and start."""
    all_of = counts.sum(-1)[:, None]
    weighted = w * counts
    total = weighted.sum(-1, keepdims=True)
    for refit in range(_REFITS + 1):
        scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)  # no reciprocal: all weights 0
        quantized = (w - start) * np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
        np.rint(quantized, out=quantized)
        np.clip(quantized, 0, _TOP, out=quantized)
        if refit == _REFITS:
            break
        counted = quantized * counts
        sums = counted.sum(-1, keepdims=True)
        spread = all_of * _dot(counted, quantized) - sums * sums
        slope = (all_of * _dot(quantized, weighted) - sums * total) / np.where(spread > 0, spread, 1)
        scale = np.where(spread > 0, slope, np.float32(0)).astype(np.float32)
        start = ((total - scale * sums) / all_of).astype(np.float32)
    error = quantized * scale
    error += start
    error -= w
    return _dot(error * counts, error), quantized, scale, start


def _dot(a: Array, b: Array) -> Array:
    matmuls: Array = np.einsum("abk,abk->ab", a, b)
    return matmuls[..., None]


def changed(name: str, what: str, block: int) -> CheckpointError:
    """The error for a tensor that is no longer stored in the form `what` that was read before."""
    return CheckpointError(
        f"{name} is no longer stored in {what} of {block}: the checkpoint changed during the compile; compile again"
    )


def _cut(name: str, stored: QuantisedBlocks, block: int, low: bool) -> QuantisedBlocks:
    if stored.block % block:
        raise changed(name, "blocks", block)
    cut = stored.cut(block)
    return cut.from_zero() if low else cut


def _centred(stored: QuantisedBlocks) -> Blocks:
    """Quantized weights with zero point 2^(bits − 1), scales and offsets."""
    offsets = stored.scale * np.asarray((1 << (stored.bits - 1)) - stored.zero_point, np.float32)
    return stored.q, stored.scale, offsets if stored.minimum is None else offsets + stored.minimum


def _stacked(built: Sequence[Blocks]) -> Blocks:
    quantized, scales, offsets = (np.concatenate(p) for p in zip(*built, strict=True))
    return quantized, scales, offsets


def _parts(bits: int, blocks: Blocks) -> dict[str, NDArray[Any]]:
    quantized, scales, offsets = blocks
    data = quantized if bits == 8 else quantized[..., 0::2] | quantized[..., 1::2] << np.uint8(4)
    return {"data": data, "rows": data, "scales": scales, "offsets": offsets, "columns": offsets.T}
