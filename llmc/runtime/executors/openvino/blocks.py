"""A paged key/value cache: blocks of BLOCK tokens in the layouts of OpenVINO's CPU plugin, and who holds them.

Layout of a block, for each layer and each of its kv_heads:
    f32, bf16        [BLOCK, head_dim] of keys, the same of values
    u8 values        [BLOCK, 8 + head_dim] bytes: each token has scale and zero point (float32), then its codes
    u8 keys          [8 + BLOCK, head_dim] bytes: scale [head_dim] and zero point [head_dim] (float32) of the block's
                     channels, then the codes of each token
with value = (code − zero point) · scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.bfloat16 import from_bfloat16, to_bfloat16
from llmc.runtime.executors.sparse import sparse_bytes

BLOCK = 32
_PARAMETERS = 8
_CODES = 255
PRECISIONS = {"f32": 4, "bf16": 2, "u8": 1}
"""Precisions of a cache, and the bytes of one number."""

Floats = NDArray[np.float32]


class BlockCache:
    """Keys and values of all layers: `tensors` are bytes [blocks, kv_heads, rows, row bytes], key and value in turn.

    Memory is taken as blocks are written.
    """

    def __init__(self, precision: str, layers: int, kv_heads: int, head_dim: int, blocks: int) -> None:
        self.precision = precision
        self._head_dim = head_dim
        width = head_dim * PRECISIONS[precision]
        compressed = precision == "u8"
        key = (blocks, kv_heads, BLOCK + (_PARAMETERS if compressed else 0), width)
        value = (blocks, kv_heads, BLOCK, width + (_PARAMETERS if compressed else 0))
        self.tensors: list[NDArray[np.uint8]] = [_zeros(shape) for _ in range(layers) for shape in (key, value)]
        self.block_bytes = sum(t[0].nbytes for t in self.tensors)

    def copy(self, source: int, target: int) -> None:
        """Copy a block."""
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    def read(self, blocks: Sequence[int], length: int) -> list[Floats]:
        """The first `length` tokens of some blocks: each layer's key and value, [kv_heads, length, head_dim]."""
        used = list(blocks[: -(-length // BLOCK)])
        found = []
        for i, tensor in enumerate(self.tensors):
            plain = self._decode(tensor[used], is_key=i % 2 == 0)
            heads = plain.shape[1]
            found.append(np.ascontiguousarray(plain.swapaxes(0, 1).reshape(heads, -1, self._head_dim)[:, :length]))
        return found

    def write(self, blocks: Sequence[int], tensors: Sequence[Floats]) -> None:
        """Put tensors [kv_heads, length, head_dim] at the start of some blocks."""
        length = tensors[0].shape[1]
        used = list(blocks[: -(-length // BLOCK)])
        for i, (tensor, given) in enumerate(zip(self.tensors, tensors, strict=True)):
            heads = given.shape[0]
            for at, block in enumerate(used):
                part = given[:, at * BLOCK : (at + 1) * BLOCK]
                tensor[block] = self._encode(part, heads, is_key=i % 2 == 0)

    def poison(self, blocks: Sequence[int], start: int, value: float) -> None:
        """Overwrite some blocks from token `start` on, as far as their format can hold `value`."""
        for at, block in enumerate(blocks):
            first = max(0, start - at * BLOCK)
            if first >= BLOCK:
                continue
            for i, tensor in enumerate(self.tensors):
                self._fill(tensor[block], first, value, is_key=i % 2 == 0)

    def _fill(self, block: NDArray[np.uint8], first: int, value: float, is_key: bool) -> None:
        if self.precision != "u8":
            block[:, first:] = self._pack(np.full((1, 1, self._head_dim), value, np.float32))
        elif is_key:
            block[:, _PARAMETERS + first :] = _CODES
            if not first:
                block[:, :_PARAMETERS] = (
                    np.full(self._head_dim * 2, value, np.float32).view(np.uint8).reshape(_PARAMETERS, -1)
                )
        else:
            block[:, first:, :_PARAMETERS] = np.full(2, value, np.float32).view(np.uint8)
            block[:, first:, _PARAMETERS:] = _CODES

    def _pack(self, plain: Floats) -> NDArray[np.uint8]:
        if self.precision == "f32":
            return np.ascontiguousarray(plain).view(np.uint8)
        return to_bfloat16(plain).view(np.uint8)

    def _decode(self, blocks: NDArray[np.uint8], is_key: bool) -> Floats:
        """[blocks, kv_heads, …] bytes → [blocks, kv_heads, BLOCK, head_dim]."""
        if self.precision == "f32":
            return blocks.view(np.float32)
        if self.precision == "bf16":
            return from_bfloat16(blocks.view(np.uint16))
        count, heads = blocks.shape[:2]
        if is_key:
            rows = np.ascontiguousarray(blocks[:, :, :_PARAMETERS]).reshape(count, heads, _PARAMETERS * self._head_dim)
            parameters = rows.view(np.float32)
            scale, zero = (p[:, :, None] for p in np.split(parameters, 2, axis=-1))
            codes = blocks[:, :, _PARAMETERS:]
        else:
            parameters = np.ascontiguousarray(blocks[..., :_PARAMETERS]).view(np.float32)
            scale, zero = parameters[..., :1], parameters[..., 1:]
            codes = blocks[..., _PARAMETERS:]
        result: Floats = (codes.astype(np.float32) - zero) * scale
        return result

    def _encode(self, part: Floats, heads: int, is_key: bool) -> NDArray[np.uint8]:
        """[kv_heads, n ≤ BLOCK, head_dim] → a block, empty behind the n tokens."""
        n = part.shape[1]
        if self.precision != "u8":
            block = np.zeros((heads, BLOCK, self._head_dim * PRECISIONS[self.precision]), np.uint8)
            block[:, :n] = self._pack(part)
            return block
        axis = 1 if is_key else 2
        low, high = part.min(axis, keepdims=True), part.max(axis, keepdims=True)
        scale = (high - low) / np.float32(_CODES)
        scale[scale == 0] = np.float32(1e-4)
        zero = -low / scale
        codes = np.clip(np.rint(part / scale + zero), 0, _CODES).astype(np.uint8)
        if is_key:
            block = np.zeros((heads, _PARAMETERS + BLOCK, self._head_dim), np.uint8)
            parameters = np.ascontiguousarray(np.concatenate([scale, zero], 1), np.float32).view(np.uint8)
            block[:, :_PARAMETERS] = parameters.reshape(heads, _PARAMETERS, self._head_dim)
            block[:, _PARAMETERS : _PARAMETERS + n] = codes
        else:
            block = np.zeros((heads, BLOCK, _PARAMETERS + self._head_dim), np.uint8)
            block[:, :n, :_PARAMETERS] = np.ascontiguousarray(np.concatenate([scale, zero], 2), np.float32).view(
                np.uint8
            )
            block[:, :n, _PARAMETERS:] = codes
        return block


def _zeros(shape: tuple[int, ...]) -> NDArray[Any]:
    return sparse_bytes(int(np.prod(shape))).reshape(shape)
