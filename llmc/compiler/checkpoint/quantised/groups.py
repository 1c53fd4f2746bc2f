"""Matrices of whole-number codes whose inputs share scales in groups: what most methods store, each in its own layout.

    value[n, k] = scale[n, g(k)] * (code[n, k] - zero[n, g(k)])

in float32: exact for scales in float16 or bfloat16, since codes and zero points have 8 bits at most.

Packed codes lie densely in 32-bit words: the first code in the lowest bits, some across two words.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import LEAST_BLOCK, BlockForm
from llmc.compiler.checkpoint.base import FloatArray, QuantisedBlocks, require_finite
from llmc.compiler.checkpoint.quantised.base import QuantisedTensor, StoredTensors

WORD = 32


def words_of(count: int, bits: int) -> int:
    """Words that so many codes take."""
    return -(-count * bits // WORD)


def unpack(words: npt.NDArray[Any], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` codes of each row: int32 or uint32 [R, W] → uint8 [R, count]."""
    data = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return data[:, :count]
    if 8 % bits == 0:
        quantized = np.empty((*data.shape, 8 // bits), np.uint8)
        for at in range(8 // bits):  # several times as fast as all shifts at once
            np.right_shift(data, np.uint8(at * bits), out=quantized[..., at])
        quantized &= np.uint8((1 << bits) - 1)
        return quantized.reshape(len(data), -1)[:, :count]
    flags = np.unpackbits(data, axis=-1, count=count * bits, bitorder="little").reshape(len(data), count, bits)
    return np.packbits(flags, axis=-1, bitorder="little")[..., 0]


QuantizedArray = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int64]


class GroupedTensor(QuantisedTensor):
    """Such a matrix [N, K] of `bits` (1 to 8) in `groups` groups; `kind` names its format for people.

    Kept blocks have 4 or 8 bits: narrower codes are moved so that the middle of their range is that of the wider one,
    and zero points with them.
    """

    def __init__(
        self, stored: StoredTensors, name: str, kind: str, shape: tuple[int, int], bits: int, groups: int, scales: str
    ) -> None:
        self.stored, self.name, self.kind = stored, name, kind
        self.shape, self.bits, self.groups = shape, bits, groups
        self._scales = scales
        self._wide = 4 if bits <= 4 else 8
        self._moved = (1 << (self._wide - 1)) - (1 << (bits - 1))

    @abstractmethod
    def read_quantized(self) -> QuantizedArray:
        """[N, K], each below 2 ** bits."""

    @abstractmethod
    def read_scales(self) -> FloatArray:
        """[N, groups], finite."""

    @abstractmethod
    def read_zeros(self) -> int | npt.NDArray[Any]:
        """Whole numbers [N, groups], or one of all."""

    def read_order(self) -> Order | None:
        """The group of each input, [K], or None where they follow each other. Raises CheckpointError."""
        return None

    @cached_property
    def _zero(self) -> int | None:
        """The zero point of all groups, None where they differ."""
        zeros = self.read_zeros()
        if isinstance(zeros, int):
            return zeros
        first = int(zeros.flat[0])
        return first if (zeros == first).all() else None

    @cached_property
    def _cut(self) -> tuple[int, Order | None] | None:
        """The size of blocks along K, and of each its group (None: in turn); None where neighbours share none."""
        width, order = self.shape[1], self.read_order()
        if order is None:
            size = width // self.groups
            return None if size % LEAST_BLOCK else (size, None)
        size = 1 << (width & -width).bit_length() - 1
        while size >= LEAST_BLOCK:
            runs = order.reshape(-1, size)
            if (runs == runs[:, :1]).all():
                return size, runs[:, 0]
            size //= 2
        return None

    @cached_property
    def _sorted(self) -> Order | None:
        """Inputs in the order of their groups, where without it there are no blocks, and groups are of one size."""
        order = None if self._cut else self.read_order()
        size = self.shape[1] // self.groups
        if order is None or size % LEAST_BLOCK or (np.bincount(order, minlength=self.groups) != size).any():
            return None
        return np.argsort(order, kind="stable")

    def _form(self, size: int, order: tuple[int, ...] = ()) -> BlockForm:
        centred = self._zero is not None and self._zero + self._moved == 1 << (self._wide - 1)
        narrow = self.bits if self.bits < self._wide else 0
        return BlockForm(self.kind, self._wide, size, "" if centred else "zeros", self._scales, narrow, order)

    def form(self) -> BlockForm | None:
        """Blocks along K, where neighbours share a scale."""
        return None if self._cut is None else self._form(self._cut[0])

    def reordered_form(self) -> BlockForm | None:
        """Of act-order: inputs in the order of their groups."""
        if self._sorted is None:
            return None
        return self._form(self.shape[1] // self.groups, tuple(self._sorted.tolist()))

    def unkept(self) -> str | None:
        """Groups that kernels do not take, or inputs whose order is not that of their groups."""
        if self._cut is not None:
            return None
        if self.read_order() is not None:
            return f"{self.kind} with act-order"
        return f"{self.kind} in groups of {self.shape[1] // self.groups}"

    def blocks(self) -> QuantisedBlocks | None:
        """In the stored order of K."""
        if self._cut is None:
            return None
        size, groups = self._cut
        return self._built(self._held_quantized(), size, groups)

    def reordered_blocks(self) -> QuantisedBlocks | None:
        """Inputs in the order of their groups."""
        if self._sorted is None:
            return None
        return self._built(self._held_quantized()[:, self._sorted], self.shape[1] // self.groups, None)

    def _built(self, quantized: QuantizedArray, size: int, groups: Order | None) -> QuantisedBlocks:
        """Blocks of `size` codes [N, K], each with the scale of its group (None: in turn)."""
        scale, zero = self.read_scales(), self._zeros()
        if groups is not None:
            scale, zero = scale[:, groups], zero if isinstance(zero, int) else zero[:, groups]
        built = QuantisedBlocks(
            self.kind, self._wide, zero, quantized.reshape(len(quantized), -1, size), np.ascontiguousarray(scale), None
        )
        require_finite(built.scale, f"{self.name} (scales)", self.stored.path)
        return built

    def _held_quantized(self) -> QuantizedArray:
        """In the range of 4 or 8 bits."""
        quantized = self.read_quantized()
        return quantized + np.uint8(self._moved) if self._moved else quantized

    def _zeros(self) -> int | FloatArray:
        """Moved as codes are."""
        if self._zero is not None:
            return self._zero + self._moved
        return np.asarray(self.read_zeros(), np.float32) + np.float32(self._moved)

    def values(self) -> FloatArray:
        """By the rule of this module."""
        built = self.blocks()
        if built is not None:
            return require_finite(built.dequantise(), self.name, self.stored.path)
        order = self.read_order()
        if order is None:
            order = np.arange(self.shape[1]) // (self.shape[1] // self.groups)
        zeros, values = self._zeros(), self._held_quantized().astype(np.float32)
        values -= np.float32(zeros) if isinstance(zeros, int) else zeros[:, order]
        values *= self.read_scales()[:, order]
        return require_finite(values, self.name, self.stored.path)


class TurnedTensor(QuantisedTensor):
    """Such a matrix of a module whose weight is [K, N] in the model: methods store it as any other."""

    def __init__(self, inner: GroupedTensor) -> None:
        self._inner, self.parts = inner, inner.parts
        self.shape = inner.shape[::-1]

    def values(self) -> FloatArray:
        """Turned."""
        return np.ascontiguousarray(self._inner.values().T)

    def unkept(self) -> str:
        """No product takes such blocks along the outputs."""
        return f"{self._inner.kind} of weights [in, out]"


def order_in(stored: StoredTensors, name: str, width: int, groups: int, unset: int | None = None) -> Order | None:
    """The group of each of `width` inputs as the tensor `name` has it; None where there is no such tensor, where it
    holds `unset`, or where groups follow each other. Raises CheckpointError for a group that there is not."""
    if name not in stored:
        return None
    order: Order = stored.quantized(name).astype(np.int64)
    if unset is not None and (order == unset).any():
        return None
    wrong = order[(order < 0) | (order >= groups)]
    if wrong.size:
        raise stored.error(
            f"{name} names group {int(wrong[0])}, and there are 0 to {groups - 1}: fetch the checkpoint again"
        )
    return None if (order == np.arange(width) // (width // groups)).all() else order
