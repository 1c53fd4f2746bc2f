"""Matrices in panels, the kernels' layout (source/panels.h), from the blocks of recipes.py and nbits.py.

Families pq8, pq4, pkept4, pkept6 and pkept8 are q8, q4 and so on with scales and offsets in float16. The scales of pq8,
and in pkept8 those of tensors without blocks, are rounded before weights are quantized. pkeptiq4 and pkeptfloat4 are
the checkpoint's own 4-bit blocks that index a table of values (BlockForm.table). A checkpoint's own scales are in
float16 already, except for the float32 ones of K-quants, which are rounded here. Quantized weights of blocks with
minimums begin at 0, so their offsets are the minimums. The parts:
  panels           uint8, one panel of 16 rows after the other
  gated            the same for a matrix [2 · N, K] whose first half gates the second: panels of both alternate
  panels+offsets, gated+offsets   the same with an offset for each block
  panels+zeros, gated+zeros       the same with a whole zero point for each block, which float16 holds exactly

Tensors of experts [E, N, K] have the matrices of all experts one after the other (source/experts.c). Families eachpq8,
eachpkept4 and so on are pq8, pkept4 and so on of each expert, with the same parts; turnedpq8 and turnedpq4 those of
tensors [E, K, N], whose blocks, if any, are of matrices [N, K] already.

Matrices of LoRA adapters that requests choose have a line for each rank (source/adapted.c): family `lora`, for one A
[R, in] and the stacked B [out, R] of its modules. Its parts are
  low      uint8 [R, in]: A's rows as signed 8-bit values, padded to whole vectors of LANES
  high     uint8 [R, out]: the same for B's columns
  scales   float32 [R]: the factor of the matmul of a row's and a column's quantized values
They are symmetric, with a scale for each line (weights/recipes.py), so that no adapter affects another's rounding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.checkpoint.gguf_file import IQ4_VALUES
from llmc.compiler.checkpoint.quantised.floats import E2M1_VALUES
from llmc.compiler.targets.onnxruntime.options import unfit_for_kernels
from llmc.compiler.weights import nbits
from llmc.compiler.weights.recipes import TensorSource, each_expert, quantise_q8, quantized, scales
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.targets.onnxruntime.formats import MatrixFormat

QuantizedArray = NDArray[np.uint8]
Array = NDArray[np.float32]
LANES = 16
SCALE_UNIT = 256
"""Factor of stored scales, which keeps the precision of small ones in float16."""

_ALIGNMENT = 64
_NONE = 255
CODEBOOKS = {"iq4": IQ4_VALUES, "float4": E2M1_VALUES}
"""128 + each value of TABLES (source/panels.h), by BlockForm.table."""
PARTS = ("panels", "gated", "panels+offsets", "gated+offsets", "panels+zeros", "gated+zeros")


class _Parts(Mapping[str, QuantizedArray]):
    """PARTS, each computed on access."""

    def __getitem__(self, part: str) -> QuantizedArray:
        if part not in PARTS:
            raise KeyError(part)
        layout, _, once = part.partition("+")
        return self.packed(gated=layout == "gated", once=once)

    def __iter__(self) -> Iterator[str]:
        return iter(PARTS)

    def __len__(self) -> int:
        return len(PARTS)

    @abstractmethod
    def packed(self, *, gated: bool, once: str) -> QuantizedArray:
        """Return the bytes; `once`: what accompanies each block's scale, "offsets", "zeros" or nothing."""


class Panels(_Parts):
    """The parts of a matrix.

    `quantized` uint8 [N, B, block] of `bits` each; w = scales · (code − 2^(bits − 1)) + offsets, both float32 [N, B].
    `names` is for messages.
    """

    def __init__(
        self, names: Sequence[str], bits: int, quantized: QuantizedArray, scales: Array, offsets: Array
    ) -> None:
        self.names, self.bits = "+".join(names), bits
        self.quantized, self.scales, self.offsets = quantized, scales, offsets

    def packed(self, *, gated: bool, once: str) -> QuantizedArray:
        rows, blocks, block = self.quantized.shape
        order = _in_turn(rows) if gated else np.arange(rows)
        lines = -(-rows // LANES) * LANES
        quantized = np.zeros((lines, blocks * block), np.uint8)
        quantized[:rows] = self.quantized[order].reshape(rows, -1)
        steps = block // 4
        laid = quantized.reshape(-1, LANES, blocks, steps, 4).transpose(0, 2, 3, 1, 4)
        if self.bits < 8:
            low, high = laid & np.uint8(15), laid >> np.uint8(4)
            laid = low[:, :, : steps // 2] | low[:, :, steps // 2 :] << np.uint8(4)
            if self.bits == 6:
                quarters = high.reshape(*high.shape[:2], 4, steps // 4, *high.shape[3:])
                above = quarters << (2 * np.arange(4, dtype=np.uint8)).reshape(1, 1, 4, 1, 1, 1)
                laid = np.concatenate([laid, np.bitwise_or.reduce(above, axis=2)], axis=2)
        first = [self.scales * np.float32(SCALE_UNIT), *self._beside_scales(once)]
        heads = np.zeros((lines // LANES, -(-blocks * LANES * 2 * len(first) // _ALIGNMENT) * _ALIGNMENT), np.uint8)
        each = np.zeros((lines, blocks, len(first)), np.float16)
        for i, values in enumerate(first):
            if not (np.abs(values) <= np.finfo(np.float16).max).all():
                raise unfit_for_kernels(f"{self.names}: weights are too large for the float16 scales of llmc's kernels")
            each[:rows, :, i] = values[order]
        head = np.ascontiguousarray(each.reshape(-1, LANES, blocks, len(first)).transpose(0, 2, 3, 1))
        heads[:, : head[0].nbytes] = head.reshape(len(heads), -1).view(np.uint8)
        return np.concatenate([heads, laid.reshape(len(heads), -1)], axis=1).reshape(-1)

    def _beside_scales(self, once: str) -> list[Array]:
        """Each block's value next to its scale, [N, B]: its offset for weights without a zero point, or −zero."""
        middle = np.float32(1 << (self.bits - 1))
        if once == "offsets":
            return [self.offsets - middle * self.scales]
        if once == "zeros":
            moved = np.divide(self.offsets, self.scales, out=np.zeros_like(self.offsets), where=self.scales != 0)
            zeros = np.rint(moved) - middle
            if not np.allclose(zeros + middle, moved, rtol=1e-5, atol=1e-5) or (self.offsets[self.scales == 0]).any():
                raise CheckpointError(f"{self.names} has no whole zero points: the checkpoint changed; compile again")
            return [zeros]
        if self.offsets.any():
            raise CheckpointError(f"{self.names} has offsets now: the checkpoint changed; compile again")
        return []


def part_of(layout: str, held: MatrixFormat) -> str:
    """Return the part name of a matrix in that format, panels or gated."""
    return f"{layout}+{'zeros' if held.zeros else 'offsets'}" if held.offsets else layout


def panel_bytes(rows: int, width: int, block: int, bits: int, offsets: bool) -> int:
    """Return the bytes of a matrix [rows, width] in panels."""
    blocks = -(-width // block)
    head = -(-blocks * LANES * (4 if offsets else 2) // _ALIGNMENT) * _ALIGNMENT
    return -(-rows // LANES) * (head + blocks * block * LANES * bits // 8)


def pq8(names: Sequence[str], source: TensorSource, block: int) -> Panels:
    """Build the parts of family pq8."""
    quantized, scales = quantise_q8(np.concatenate([source.tensor(n) for n in names]), block, to_float16)
    return Panels(names, 8, quantized, scales, np.zeros_like(scales))


def pq4(names: Sequence[str], source: TensorSource, block: int) -> Panels:
    """Build the parts of family pq4."""
    return Panels(names, 4, *nbits.q4_blocks(names, source, block))


def pkept4(names: Sequence[str], source: TensorSource, block: int) -> Panels:
    """Build the parts of family pkept4. Raises CheckpointError for a source without 4-bit blocks of this size."""
    return Panels(names, 4, *nbits.kept4_blocks(names, source, block, low=True))


def pkept6(names: Sequence[str], source: TensorSource, block: int) -> Panels:
    """Build the parts of family pkept6. Raises CheckpointError for a source without such blocks of at most 6 bits."""
    return Panels(names, 6, *nbits.kept6_blocks(names, source, block))


def _tabled(table: str, names: Sequence[str], source: TensorSource, block: int) -> Panels:
    """Raises CheckpointError for a source with another table."""
    quantized, scales, offsets = nbits.kept8_blocks(names, source, block)
    numbers = np.full(256, _NONE, np.uint8)
    numbers[CODEBOOKS[table]] = np.arange(16)
    found = numbers[quantized]
    if offsets.any() or (found == _NONE).any():
        raise nbits.changed("+".join(names), f"blocks of {table}", block)
    return Panels(names, 4, found, scales, offsets)


pkeptiq4 = partial(_tabled, "iq4")
pkeptfloat4 = partial(_tabled, "float4")


def pkept8(names: Sequence[str], source: TensorSource, block: int) -> Panels:
    """Build the parts of family pkept8."""
    return Panels(names, 8, *nbits.kept8_blocks(names, source, block, to_float16, low=True))


def to_float16(scales: Array) -> Array:
    """Round scales as panels store them: nearest float16 value, in float32; infinite where too large."""
    with np.errstate(over="ignore"):
        held = (scales * np.float32(SCALE_UNIT)).astype(np.float16)
    return held.astype(np.float32) / np.float32(SCALE_UNIT)


def _in_turn(rows: int) -> NDArray[np.int64]:
    """Row indices that alternate 16 rows of the first half and 16 of the second."""
    return np.arange(rows).reshape(2, -1, LANES).transpose(1, 0, 2).reshape(-1)


_Make = Callable[[Sequence[str], TensorSource, int], Panels]


class ExpertPanels(_Parts):
    """The parts of one tensor of experts, one expert at a time."""

    def __init__(
        self, make: _Make, names: Sequence[str], source: TensorSource, block: int, *, turned: bool = False
    ) -> None:
        (self.name,) = names
        self.make, self.source, self.block, self.turned = make, source, block, turned

    def packed(self, *, gated: bool, once: str) -> QuantizedArray:
        each = each_expert(self.name, self.source, turned=self.turned)
        return np.concatenate([self.make([one.name], one, self.block).packed(gated=gated, once=once) for one in each])


eachpq8 = partial(ExpertPanels, pq8)
eachpq4 = partial(ExpertPanels, pq4)
turnedpq8 = partial(ExpertPanels, pq8, turned=True)
turnedpq4 = partial(ExpertPanels, pq4, turned=True)
eachpkept4 = partial(ExpertPanels, pkept4)
eachpkept6 = partial(ExpertPanels, pkept6)
eachpkept8 = partial(ExpertPanels, pkept8)
eachpkeptiq4 = partial(ExpertPanels, pkeptiq4)
eachpkeptfloat4 = partial(ExpertPanels, pkeptfloat4)


def lora(names: Sequence[str], source: TensorSource, block: int) -> dict[str, NDArray[Any]]:
    """Build the parts of family lora."""
    del block
    low, *high = (source.tensor(name) for name in names)
    columns = np.concatenate(high).T
    each = scales(low, "int8"), scales(columns, "int8")
    return {"low": _lines(low, each[0]), "high": _lines(columns, each[1]), "scales": each[0] * each[1]}


def line(width: int) -> int:
    """Return the padded length of a line of `width` values."""
    return -(-width // LANES) * LANES


def _lines(matrix: Array, scale: Array) -> NDArray[np.uint8]:
    built = np.zeros((len(matrix), line(matrix.shape[1])), np.int8)
    built[:, : matrix.shape[1]] = quantized(matrix, scale, "int8")
    return built.view(np.uint8)
