"""Storage formats of keys and values for ONNX Runtime's graphs, by a manifest's option `kv_cache_dtype`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.bfloat16 import from_bfloat16, to_bfloat16
from llmc.runtime.cache_shape import SCALE_BYTES, CacheShape
from llmc.runtime.executors.slot_cache import TensorPart, Tensors

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

_LARGEST, _LEAST = np.float32(127), np.float32(1e-30)
_NO_NUMBER = 0x7FC00000


def encoded(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantize values [.., width] to lines [.., width + SCALE_BYTES]. A line with a non-finite value decodes to NaN.

    In the format of llmc's attention (kernels/source/cache_lines.h), a line holds one head's key or value of a token:
    int8 [width] quantized values, and their scale, the first half of a float32 (bfloat16). The largest quantized value
    is 127, so decoding and encoding again is bitwise stable.
    """
    finite = np.isfinite(numbers).all(-1, keepdims=True)
    numbers = np.where(finite, numbers, 0).astype(np.float32)
    bits = (np.abs(numbers).max(-1, keepdims=True) / _LARGEST).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    scales = bits.view(np.float32)
    kept = scales >= _LEAST
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=kept)
    bits = np.where(finite, np.where(kept, bits, 0), _NO_NUMBER) >> 16
    quantized = np.rint(numbers * inverse).astype(np.int8).view(np.uint8)
    return np.concatenate([quantized, bits.astype("<u2").view(np.uint8)], -1)


def decoded(lines: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantize lines to values [.., width]."""
    quantized = np.ascontiguousarray(lines[..., :-SCALE_BYTES]).view(np.int8)
    bits = np.ascontiguousarray(lines[..., -SCALE_BYTES:]).view("<u2").astype(np.uint32) << 16
    return quantized.astype(np.float32) * bits.view(np.float32)


class CodedTensors(Tensors):
    """Keys and values in 8 bits."""

    def numbers(self, held: NDArray[Any]) -> NDArray[np.float32]:
        return decoded(held)

    def held(self, numbers: NDArray[np.float32]) -> NDArray[Any]:
        return encoded(numbers)

    def filling(self, part: TensorPart, value: float) -> NDArray[Any]:
        return encoded(np.full(part.like.shape[1] - SCALE_BYTES, value, np.float32))


_SIGN, _INFINITE, _NOT_A_NUMBER = 0x8000, 0x7F80, 0x7FC0


def rounded(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of each value in a bfloat16 cache, in the format of llmc's attention (kernels/source/cache_lines.h).

    Values below 2⁻¹²⁶ are zero. There are no infinities, because attention could silently ignore them.
    """
    bits = to_bfloat16(numbers)
    size = bits & ~np.uint16(_SIGN)
    bits[size < 0x80] &= _SIGN
    bits[size >= _INFINITE] = _NOT_A_NUMBER
    return bits


class RoundedTensors(Tensors):
    """Keys and values in bfloat16."""

    def numbers(self, held: NDArray[Any]) -> NDArray[np.float32]:
        return from_bfloat16(held)

    def held(self, numbers: NDArray[np.float32]) -> NDArray[Any]:
        return rounded(numbers)

    def filling(self, part: TensorPart, value: float) -> NDArray[Any]:
        return rounded(np.full(1, value, np.float32))


class CacheFormat(NamedTuple):
    """A storage format.

    Its fields are the array dtype, ONNX Runtime's name of it, the class that stores it, extra elements per line, and
    the narrowest dtype that represents its values exactly.
    """

    dtype: type
    onnx_type: str
    tensors: type[Tensors] = Tensors
    beside: int = 0
    exact: str = "f32"


FLOATS = CacheFormat(np.float32, "tensor(float)")
FORMATS = {
    "f16": CacheFormat(np.float16, "tensor(float16)", exact="f16"),
    "bf16": CacheFormat(np.uint16, "tensor(uint16)", RoundedTensors, exact="bf16"),
    "int8": CacheFormat(np.uint8, "tensor(uint8)", CodedTensors, SCALE_BYTES),
}


def format_of(bundle: Bundle) -> CacheFormat:
    """The format of a bundle's graphs; float32 if its manifest names none."""
    return FORMATS.get(str(bundle.manifest.options.get("kv_cache_dtype")), FLOATS)


def lines_of(bundle: Bundle) -> CacheShape:
    """A bundle's cache shape with keys and values as wide as lines."""
    shape, beside = bundle.cache_shape, format_of(bundle).beside
    if not beside:
        return shape
    wide = (replace(t, shape=(t.shape[0], t.shape[1] + beside)) if t.kind == "kv" else t for t in shape)
    return CacheShape(shape.layers, tuple(wide))
