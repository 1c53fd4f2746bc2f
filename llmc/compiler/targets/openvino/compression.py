"""The families of weight transforms that OpenVINO's decompression takes (see weights/recipes.py, FAMILIES).

All follow w ≈ scale · (code − zero), with a scale for every `group` inputs of a row, or for the whole row (group 0).
Their parts, [N, K/group, …] or, for whole rows, [N, …]:
  data     codes: int8 or uint8 [.., group], 4-bit ones two in a byte, the first one low
  scales   float32 [.., 1]
  zeros    float32 [.., 1]: zero points, which need not be whole numbers; only in families with unsigned codes

    i8       int8, symmetric: scale = largest magnitude / 127 (1 where that is 0), codes −127 … 127
    u4       4 bits with zero points, by the rule of weights/nbits.py; the checkpoint's own 4-bit blocks where this size
             divides them
    u4kept   the checkpoint's own 4-bit blocks (GGUF Q2_K to Q4_K, Q4_0 and Q4_1, gptq, awq)
    i8kept   the checkpoint's own 8-bit blocks without zero points of their own (GGUF Q8_0, Q6_K, IQ4)
    f4kept   the checkpoint's own float4 e2m1 (nvfp4, mxfp4), `data` in that type
    u8kept   both of these stacked as uint8, and tensors without blocks by the rule of i8
    f16      float16: only `data`

Blocks with a minimum have zero = −minimum / scale, which reproduces scale · code + minimum to within 2⁻²² of |minimum|
+ |scale| · (largest code). A block whose scale is 0 holds just its minimum, exactly: scale = minimum, zero = −1 and
codes 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.checkpoint.quantised.floats import E2M1_VALUES
from llmc.compiler.weights import recipes
from llmc.compiler.weights.nbits import quantise_q4
from llmc.compiler.weights.recipes import TensorSource
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import QuantisedBlocks

Floats = NDArray[np.float32]
Parts = dict[str, NDArray[Any]]
Blocks = tuple[NDArray[np.uint8], Floats, Floats]
"""Quantized weights [N, K/group, group], scales and zero points [N, K/group]."""

_SIGN = 128
_AT_ONCE = 1 << 19
"""Bytes of a matrix that are quantized at once, so that intermediate values stay in a core's cache."""
_FLOAT4 = np.zeros(256, np.uint8)
"""Maps 128 + twice a value of float4 e2m1 to its encoding."""
_FLOAT4[E2M1_VALUES] = np.arange(16)
_Q4_ZERO = np.float32(8)


def i8(names: Sequence[str], source: TensorSource, group: int) -> Parts:
    """Build the parts of family i8."""
    parts = zip(*(quantise_i8(_matrix(name, source), group) for name in names), strict=True)
    data, scales = (held[0] if len(held) == 1 else np.concatenate(held) for held in parts)
    return {"data": data, "scales": scales}


def u4(names: Sequence[str], source: TensorSource, group: int) -> Parts:
    """Build the parts of family u4."""

    def blocks(name: str) -> Blocks:
        stored = source.quantised_blocks(name)
        if stored is not None and stored.bits == 4 and not stored.block % group:
            return _exact(stored.cut(group))
        quantized, scales, offsets = quantise_q4(_matrix(name, source), group)
        return with_zeros(quantized, scales, offsets - _Q4_ZERO * scales)

    return _parts(names, blocks, 4)


def u4kept(names: Sequence[str], source: TensorSource, group: int) -> Parts:
    """Build the parts of family u4kept. Raises CheckpointError for a tensor without 4-bit blocks of this size."""
    return _parts(names, lambda name: _exact(_stored(name, source, 4, group)), 4)


def i8kept(names: Sequence[str], source: TensorSource, group: int) -> Parts:
    """Build the parts of family i8kept. Raises CheckpointError for a tensor without 8-bit blocks of this size."""
    stored = [_stored(name, source, 8, group) for name in names]
    data = np.concatenate([(s.q ^ np.uint8(_SIGN)).view(np.int8) for s in stored])
    return {"data": data, "scales": np.concatenate([s.scale for s in stored])[..., None]}


def f4kept(names: Sequence[str], source: TensorSource, group: int) -> Parts:
    """Build the parts of family f4kept. Raises CheckpointError for a tensor without 8-bit blocks of this size."""
    stored = [_stored(name, source, 8, group) for name in names]
    quantized = np.concatenate([_FLOAT4[s.q] for s in stored])
    return {"data": _in_pairs(quantized), "scales": np.concatenate([2 * s.scale for s in stored])[..., None]}


def u8kept(names: Sequence[str], source: TensorSource, group: int) -> Parts:
    """Build the parts of family u8kept. Raises CheckpointError for blocks of another size."""

    def blocks(name: str) -> Blocks:
        stored = source.quantised_blocks(name)
        if stored is not None:
            return _exact(_stored(name, source, stored.bits, group))
        data, scales = quantise_i8(_matrix(name, source), group)
        zeros = np.full_like(scales[..., 0], _SIGN)
        return data.view(np.uint8) ^ np.uint8(_SIGN), scales[..., 0], zeros

    return _parts(names, blocks, 8)


def f16(names: Sequence[str], source: TensorSource, _: int) -> Parts:
    """Build the one part of family f16. Raises CheckpointError for a tensor that float16 cannot hold."""
    return {"data": np.concatenate([_to_f16(name, source) for name in names])}


def quantise_i8(weight: Floats, group: int) -> tuple[NDArray[np.int8], Floats]:
    """Quantize [N, K] → [N, K/group, group] and scales [N, K/group, 1]; group 0: [N, K] and [N, 1]."""
    height, width = weight.shape
    grouped = weight.reshape(height, width // group, group) if group else weight
    quantized, scale = np.empty(grouped.shape, np.int8), np.empty((*grouped.shape[:-1], 1), np.float32)
    some = max(1, _AT_ONCE // (4 * max(1, width)))
    for first in range(0, height, some):
        at = slice(first, first + some)
        scale[at, ..., 0] = recipes.scales(grouped[at], "int8")
        quantized[at] = recipes.quantized(grouped[at], scale[at, ..., 0], "int8")
    return quantized, scale


def with_zeros(quantized: NDArray[np.uint8], scale: Floats, minimum: Floats) -> Blocks:
    """Convert blocks of value scale · code + minimum to scale · (code − zero)."""
    constant = scale == 0
    zero = np.full_like(scale, -1)
    np.divide(-minimum, scale, out=zero, where=~constant)
    return np.where(constant[..., None], np.uint8(0), quantized), np.where(constant, minimum, scale), zero


def _matrix(name: str, source: TensorSource) -> Floats:
    """[N, K]; matrices of experts, [E, N, K], are stacked."""
    held = source.tensor(name)
    return held.reshape(-1, held.shape[-1])


def _exact(stored: QuantisedBlocks) -> Blocks:
    if stored.minimum is None:
        return stored.q, stored.scale, np.broadcast_to(np.float32(stored.zero_point), stored.scale.shape)
    return with_zeros(stored.from_zero().q, stored.scale, stored.minimum)


def _stored(name: str, source: TensorSource, bits: int, group: int) -> QuantisedBlocks:
    stored = source.quantised_blocks(name)
    size = group or (0 if stored is None else stored.block)
    if stored is None or stored.bits != bits or stored.block % size or not (group or stored.q.shape[1] == 1):
        found = "no blocks" if stored is None else f"{stored.type} blocks of {stored.block}"
        raise CheckpointError(
            f"{name} has {found} in the checkpoint, not blocks of {group} in {bits} bits: the file changed since its "
            "types were read; compile again"
        )
    return stored.cut(size)


def _parts(names: Sequence[str], blocks: Callable[[str], Blocks], bits: int) -> Parts:
    quantized, scales, zeros = (np.concatenate(p) for p in zip(*map(blocks, names), strict=True))
    return {
        "data": quantized if bits == 8 else _in_pairs(quantized),
        "scales": scales[..., None],
        "zeros": zeros[..., None],
    }


def _in_pairs(quantized: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return quantized[..., 0::2] | quantized[..., 1::2] << np.uint8(4)


def _to_f16(name: str, source: TensorSource) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = source.tensor(name).astype(np.float16)
    if not np.isfinite(half).all():
        raise CheckpointError(f"{name} has values beyond float16's 65504; choose --dtype bf16 or f32")
    return half
