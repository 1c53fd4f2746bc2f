"""A paged KV cache: blocks of BLOCK tokens in the layouts of OpenVINO's CPU plugin, and their owners.

Block layout of each cache tensor, for its heads and width:
    f32, bf16        [BLOCK, width] of keys, the same of values
    u8 values        [BLOCK, 8 + width] bytes: each token has scale and zero point (float32), then its quantized values
    u8 keys          [8 + BLOCK, width] bytes: scale [width] and zero point [width] (float32) of the block's channels,
                     then each token's quantized values
with value = (quantized − zero point) · scale. In u8, values narrower than their keys are padded with zeros to their
width, because OpenVINO 2026.4.1 computes wrong results for narrower ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.bfloat16 import from_bfloat16, to_bfloat16
from llmc.runtime.executors.slots import sparse_bytes

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheShape, CacheTensor

BLOCK = 32
_PARAMETERS = 8
_LEVELS = 255
PRECISIONS = {"f32": 4, "bf16": 2, "u8": 1}
"""Cache precisions and their bytes per number."""

Floats = NDArray[np.float32]


class BlockCache:
    """Keys and values in turn, as in `kept`: byte `tensors` [blocks, heads, rows, row bytes], allocated on write."""

    def __init__(self, precision: str, kept: Sequence[CacheTensor], blocks: int) -> None:
        self.precision = precision
        self._kept = [t.shape[1] for t in kept]
        self._widths = held_widths(precision, kept)
        self.tensors: list[NDArray[np.uint8]] = [
            sparse_bytes(blocks * math.prod(shape)).reshape(blocks, *shape) for shape in _block_shapes(precision, kept)
        ]
        self.block_bytes = block_bytes(precision, kept)

    def copy(self, source: int, target: int) -> None:
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    def read(self, blocks: Sequence[int], length: int) -> list[Floats]:
        """The first `length` tokens of some blocks: each tensor's, [heads, length, width]."""
        used = list(blocks[: -(-length // BLOCK)])
        found = []
        for i, (tensor, width) in enumerate(zip(self.tensors, self._widths, strict=True)):
            plain = self._decode(tensor[used], width, is_key=i % 2 == 0)
            by_head = plain.swapaxes(0, 1).reshape(plain.shape[1], -1, width)
            found.append(np.ascontiguousarray(by_head[:, :length, : self._kept[i]]))
        return found

    def write(self, blocks: Sequence[int], tensors: Sequence[Floats]) -> None:
        """Write tensors [heads, length, width] to the start of some blocks."""
        for i, (tensor, given) in enumerate(zip(self.tensors, tensors, strict=True)):
            behind = self._widths[i] - self._kept[i]
            wide = np.pad(given, ((0, 0), (0, 0), (0, behind))) if behind else given
            for at, block in enumerate(blocks[: -(-given.shape[1] // BLOCK)]):
                tensor[block] = self._encode(wide[:, at * BLOCK : (at + 1) * BLOCK], is_key=i % 2 == 0)

    def put(self, at: int, blocks: NDArray[np.int32], offsets: NDArray[np.int32], new: Floats) -> None:
        """Write tokens `new` […, heads, width] of tensor `at` of a float32 cache to their blocks and offsets."""
        self.tensors[at].view(np.float32)[blocks, :, offsets] = new

    def nan_fill(self, blocks: Sequence[int], start: int, value: float) -> None:
        """Fill some blocks from token `start` on with `value`, as far as their format can represent it."""
        for at, block in enumerate(blocks):
            first = max(0, start - at * BLOCK)
            if first >= BLOCK:
                continue
            for i, (tensor, width) in enumerate(zip(self.tensors, self._widths, strict=True)):
                self._fill(tensor[block], width, first, value, is_key=i % 2 == 0)

    def _fill(self, block: NDArray[np.uint8], width: int, first: int, value: float, is_key: bool) -> None:
        if self.precision != "u8":
            block[:, first:] = self._pack(np.full((1, 1, width), value, np.float32))
        elif is_key:
            block[:, _PARAMETERS + first :] = _LEVELS
            if not first:
                block[:, :_PARAMETERS] = np.full(width * 2, value, np.float32).view(np.uint8).reshape(_PARAMETERS, -1)
        else:
            block[:, first:, :_PARAMETERS] = np.full(2, value, np.float32).view(np.uint8)
            block[:, first:, _PARAMETERS:] = _LEVELS

    def _pack(self, plain: Floats) -> NDArray[np.uint8]:
        if self.precision == "f32":
            return np.ascontiguousarray(plain).view(np.uint8)
        return to_bfloat16(plain).view(np.uint8)

    def _decode(self, blocks: NDArray[np.uint8], width: int, is_key: bool) -> Floats:
        """[blocks, heads, …] bytes → [blocks, heads, BLOCK, width]."""
        if self.precision == "f32":
            return blocks.view(np.float32)
        if self.precision == "bf16":
            return from_bfloat16(blocks.view(np.uint16))
        count, heads = blocks.shape[:2]
        if is_key:
            rows = np.ascontiguousarray(blocks[:, :, :_PARAMETERS]).reshape(count, heads, _PARAMETERS * width)
            parameters = rows.view(np.float32)
            scale, zero = (p[:, :, None] for p in np.split(parameters, 2, axis=-1))
            quantized = blocks[:, :, _PARAMETERS:]
        else:
            parameters = np.ascontiguousarray(blocks[..., :_PARAMETERS]).view(np.float32)
            scale, zero = parameters[..., :1], parameters[..., 1:]
            quantized = blocks[..., _PARAMETERS:]
        result: Floats = (quantized.astype(np.float32) - zero) * scale
        return result

    def _encode(self, part: Floats, is_key: bool) -> NDArray[np.uint8]:
        """[heads, n ≤ BLOCK, width] → a block, empty after the n tokens."""
        heads, n, width = part.shape
        block = np.zeros((heads, *_block_shape(self.precision, width, is_key)), np.uint8)
        if self.precision != "u8":
            block[:, :n] = self._pack(part)
            return block
        axis = 1 if is_key else 2
        low, high = part.min(axis, keepdims=True), part.max(axis, keepdims=True)
        scale = (high - low) / np.float32(_LEVELS)
        scale[scale == 0] = np.float32(1e-4)
        zero = -low / scale
        quantized = np.clip(np.rint(part / scale + zero), 0, _LEVELS).astype(np.uint8)
        parameters = np.ascontiguousarray(np.concatenate([scale, zero], axis), np.float32).view(np.uint8)
        if is_key:
            block[:, :_PARAMETERS] = parameters.reshape(heads, _PARAMETERS, width)
            block[:, _PARAMETERS : _PARAMETERS + n] = quantized
        else:
            block[:, :n, :_PARAMETERS] = parameters
            block[:, :n, _PARAMETERS:] = quantized
        return block


def cache_names(shape: CacheShape) -> list[str]:
    """Names of a cache's keys and values in paged models, in its order."""
    return [f"{('key', 'value')[i % 2]}_cache.{i // 2}" for i in range(len(shape.kv))]


def rings_of(kept: Sequence[CacheTensor]) -> list[int]:
    """Sizes of the ring buffers in token slots; each has its own pool of blocks."""
    return sorted({t.ring for t in kept if t.ring is not None})


def of_ring(name: str, ring: int | None) -> str:
    """Name of a model input about one ring buffer's layers, or about those that keep all tokens."""
    return name if ring is None else f"{name}.{ring}"


def held_widths(precision: str, kept: Sequence[CacheTensor]) -> list[int]:
    """Stored widths of the cache's tensors."""
    widths = [t.shape[1] for t in kept]
    wide = precision == "u8"
    return [max(width, widths[i - 1]) if wide and i % 2 else width for i, width in enumerate(widths)]


def block_bytes(precision: str, kept: Sequence[CacheTensor]) -> int:
    """Bytes of one block of all tensors."""
    return sum(map(math.prod, _block_shapes(precision, kept)))


def _block_shapes(precision: str, kept: Sequence[CacheTensor]) -> list[tuple[int, ...]]:
    widths = enumerate(zip(kept, held_widths(precision, kept), strict=True))
    return [(t.shape[0], *_block_shape(precision, width, is_key=i % 2 == 0)) for i, (t, width) in widths]


def _block_shape(precision: str, width: int, is_key: bool) -> tuple[int, int]:
    """Rows of a head's block, and bytes per row."""
    more = _PARAMETERS if precision == "u8" else 0
    held = width * PRECISIONS[precision]
    return (BLOCK + more, held) if is_key else (BLOCK, held + more)
