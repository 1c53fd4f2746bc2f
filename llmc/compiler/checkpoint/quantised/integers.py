"""Integer-quantized matrices with scales per group of inputs: the common part of most methods, gptq, and awq.

    value[n, k] = scale[n, g(k)] * (q[n, k] - zero[n, g(k)])

in float32. This is exact for float16 and bfloat16 scales, since weights and zero points have at most 8 bits. The
references multiply in float16 or in the dtype of the scales.

Packed weights lie densely in 32-bit words: the first in the lowest bits, some across two words. gptq and awq store a
matrix P.weight [N, K] in G = K / group_size groups, or 1 for a group_size of -1:

               gptq                                         awq (AutoAWQ's GEMM)
    P.qweight  int32 [K · bits/32, N], packed along K       int32 [K, N/8], packed along N
    P.qzeros   int32 [G, N · bits/32], packed along N       int32 [G, N/8], packed along N
    P.scales   float [G, N]                                 float [G, N]
    P.g_idx    int32 [K], the group of each input; without it, groups are consecutive
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import LEAST_BLOCK, BlockForm
from llmc.compiler.checkpoint.base import FloatArray, QuantisedBlocks, require_finite
from llmc.compiler.checkpoint.quantised import (
    DTYPES,
    QuantisedTensor,
    Reading,
    StoredTensors,
    stated_group,
    stated_number,
)

WORD = 32


def words_of(count: int, bits: int) -> int:
    """Number of words for `count` weights."""
    return -(-count * bits // WORD)


def unpack(words: npt.NDArray[Any], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` weights of each row: int32 or uint32 [R, W] → uint8 [R, count]."""
    data = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return data[:, :count]
    if 8 % bits == 0:
        quantized = np.empty((*data.shape, 8 // bits), np.uint8)
        for at in range(8 // bits):  # several times faster than one broadcast shift
            np.right_shift(data, np.uint8(at * bits), out=quantized[..., at])
        quantized &= np.uint8((1 << bits) - 1)
        return quantized.reshape(len(data), -1)[:, :count]
    flags = np.unpackbits(data, axis=-1, count=count * bits, bitorder="little").reshape(len(data), count, bits)
    return np.packbits(flags, axis=-1, bitorder="little")[..., 0]


QuantizedArray = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int64]


class GroupedTensor(QuantisedTensor):
    """A matrix [N, K] of `bits` (1 to 8) in `groups` groups; `kind` names its format for people. Blocks have 4 or 8
    bits. Narrower weights are shifted, with their zero points, to the middle of the wider range."""

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
        """Integers [N, groups], or one for all."""

    def read_order(self) -> Order | None:
        """The group of each input, [K], or None if groups are consecutive. Raises CheckpointError."""
        return None

    @cached_property
    def _zero(self) -> int | None:
        """The zero point of all groups, or None if they differ."""
        zeros = self.read_zeros()
        if isinstance(zeros, int):
            return zeros
        first = int(zeros.flat[0])
        return first if (zeros == first).all() else None

    @cached_property
    def _cut(self) -> tuple[int, Order | None] | None:
        """Block size along K, and the group of each block (None: consecutive); None if neighbours share no group."""
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
        """Inputs sorted by group, if that order alone gives blocks and all groups have one size."""
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
        return None if self._cut is None else self._form(self._cut[0])

    def reordered_form(self) -> BlockForm | None:
        if self._sorted is None:
            return None
        return self._form(self.shape[1] // self.groups, tuple(self._sorted.tolist()))

    def unkept(self) -> str | None:
        if self._cut is not None:
            return None
        if self.read_order() is not None:
            return f"{self.kind} with act-order"
        return f"{self.kind} in groups of {self.shape[1] // self.groups}"

    def blocks(self) -> QuantisedBlocks | None:
        if self._cut is None:
            return None
        size, groups = self._cut
        return self._built(self._held_quantized(), size, groups)

    def reordered_blocks(self) -> QuantisedBlocks | None:
        if self._sorted is None:
            return None
        return self._built(self._held_quantized()[:, self._sorted], self.shape[1] // self.groups, None)

    def _built(self, quantized: QuantizedArray, size: int, groups: Order | None) -> QuantisedBlocks:
        """Blocks of `size` from weights [N, K]; `groups` is the group of each block (None: consecutive)."""
        scale, zero = self.read_scales(), self._zeros()
        if groups is not None:
            scale, zero = scale[:, groups], zero if isinstance(zero, int) else zero[:, groups]
        built = QuantisedBlocks(
            self.kind, self._wide, zero, quantized.reshape(len(quantized), -1, size), np.ascontiguousarray(scale), None
        )
        require_finite(built.scale, f"{self.name} (scales)", self.stored.path)
        return built

    def _held_quantized(self) -> QuantizedArray:
        quantized = self.read_quantized()
        return quantized + np.uint8(self._moved) if self._moved else quantized

    def _zeros(self) -> int | FloatArray:
        if self._zero is not None:
            return self._zero + self._moved
        return np.asarray(self.read_zeros(), np.float32) + np.float32(self._moved)

    def values(self) -> FloatArray:
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
    """A matrix of a module whose weight is [K, N] in the model; methods store it as [N, K] nevertheless."""

    def __init__(self, inner: GroupedTensor) -> None:
        self._inner, self.parts = inner, inner.parts
        self.shape = inner.shape[::-1]

    def values(self) -> FloatArray:
        return np.ascontiguousarray(self._inner.values().T)

    def unkept(self) -> str:
        return f"{self._inner.kind} of weights [in, out]"


def order_in(stored: StoredTensors, name: str, width: int, groups: int, unset: int | None = None) -> Order | None:
    """Read the group of each of `width` inputs from the tensor `name`. Returns None if the tensor is absent, holds
    `unset`, or has consecutive groups. Raises CheckpointError for an invalid group."""
    if name not in stored:
        return None
    order: Order = stored.quantized(name).astype(np.int64)
    if unset is not None and (order == unset).any():
        return None
    wrong = order[(order < 0) | (order >= groups)]
    if wrong.size:
        raise stored.error(
            f"{name} names group {int(wrong[0])}, but groups are 0 to {groups - 1}: fetch the checkpoint again"
        )
    return None if (order == np.arange(width) // (width // groups)).all() else order


BITS = (2, 3, 4, 8)
_ONE, _TWO = "gptq", "gptq_v2"
_QWEIGHT = ".qweight"


def _modules(kind: str, stored: StoredTensors) -> list[str]:
    modules = [name.removesuffix(_QWEIGHT) for name in stored.names(_QWEIGHT)]
    if not modules:
        raise stored.error(f"quantization_config says {kind}, but no tensor ends with {_QWEIGHT}: fetch it again")
    return modules


def read_gptq(stated: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's gptq tensors: weights of 2, 3, 4 or 8 bits.

    Version 1 ("gptq") stores zero points minus one. It adds the one to whole words, which restores what a zero point of
    0 borrowed from its neighbour; with 3 bits it adds one to each. `desc_act` (act-order) assigns inputs to groups in
    any order, by g_idx. `dynamic` states other bits or groups for modules whose names match (GPTQModel).

    Sources: GPTQModel, nn_modules/qlinear/__init__.py (PackableQuantLinear.pack, dequantize_weight) and utils/model.py
    (convert_gptq_v1_to_v2_format_module); transformers 5.23, utils/quantization_config.py (GPTQConfig).
    """
    layout = stated.get("checkpoint_format") or stated.get("format") or _ONE
    if layout not in (_ONE, _TWO):
        raise stored.error(
            f"quantization_config: gptq format {layout!r:.60} is not supported; supported: {_ONE}, {_TWO}. Convert it "
            "with GPTQModel, or use the unquantized checkpoint"
        )
    modules = _modules("gptq", stored)
    return Reading(
        {f"{m}.weight": _GptqMatrix(stored, m, _stated_for(m, stated, stored), layout == _ONE) for m in modules}
    )


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
            raise stored.error(f"{module}{_QWEIGHT} is quantized, but dynamic says {pattern!r:.60}: fetch it again")
        if found:
            return {**stated, **own}
    return stated


class _GptqMatrix(GroupedTensor):
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


ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index among eight neighbours of each weight in a word, from its lowest bits on."""
_BITS = 4
_LAYOUT = "gemm"


def read_awq(stated: Mapping[str, Any], stored: StoredTensors) -> Reading:
    """Read a folder's awq tensors: 4-bit weights, of which a word holds eight neighbours along N.

    Sources: AutoAWQ 0.2.9, modules/linear/gemm.py (WQLinear_GEMM) and utils/packing_utils.py; transformers 5.23,
    utils/quantization_config.py (AwqConfig).
    """
    layout = str(stated.get("version") or stated.get("format") or _LAYOUT).lower()
    if stated.get("backend") == "llm-awq":
        layout = "llm-awq"
    if layout != _LAYOUT:
        raise stored.error(
            f"quantization_config: awq version {layout!r:.60} is not supported; supported: {_LAYOUT}. Use a checkpoint "
            f"in {_LAYOUT}, or the unquantized one"
        )
    return Reading({f"{module}.weight": _AwqMatrix(stored, module, stated) for module in _modules("awq", stored)})


class _AwqMatrix(GroupedTensor):
    def __init__(self, stored: StoredTensors, module: str, stated: Mapping[str, Any]) -> None:
        stated_number(stated, "bits", stored, (_BITS,))
        self.parts = self._quantized, self._zeros_at, self._scales_at = (
            f"{module}.qweight", f"{module}.qzeros", f"{module}.scales",
        )  # fmt: skip
        stored.require(self._quantized, self._quantized, ("I32",))
        packed = stored.matrix(self._quantized)
        width, rows = packed[0], packed[1] * WORD // _BITS
        groups = width // stated_group(stated.get("group_size"), stored, width, self._quantized)
        stored.require(self._quantized, self._scales_at, tuple(DTYPES), (groups, rows))
        stored.require(self._quantized, self._zeros_at, ("I32",), (groups, packed[1]))
        scales = stored.scales_of(self._scales_at)
        super().__init__(stored, f"{module}.weight", "awq", (rows, width), _BITS, groups, scales)

    def read_quantized(self) -> QuantizedArray:
        return np.ascontiguousarray(self._in_order(self._quantized).T)

    def read_scales(self) -> FloatArray:
        return self.stored.floats(self._scales_at).T

    def read_zeros(self) -> npt.NDArray[Any]:
        return self._in_order(self._zeros_at).T

    def _in_order(self, name: str) -> QuantizedArray:
        """Words [.., N/8] → weights [.., N]."""
        quantized = unpack(self.stored.quantized(name), _BITS, self.shape[0]).reshape(
            -1, self.shape[0] // len(ORDER), 8
        )
        built = np.empty_like(quantized)
        built[..., list(ORDER)] = quantized
        return built.reshape(len(quantized), -1)


READERS = {"awq": read_awq, "gptq": read_gptq}
