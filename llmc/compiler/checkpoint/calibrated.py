"""A checkpoint with calibrated 4-bit blocks of some matrices (weights/calibration.py), next to their floats.

    file = (q:u8[N, K/2] scales:f32[N, K/32] minimums:f32[N, K/32])*     one matrix after another

Two 4-bit weights share a byte, the first in its low half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import (
    Checkpoint,
    FloatArray,
    HashFile,
    MappedFile,
    QuantisedBlocks,
    WrappedCheckpoint,
)

BLOCK = 32
FORM = BlockForm("calibrated", 4, BLOCK, "minimums", "float16")


class CalibratedCheckpoint(WrappedCheckpoint):
    """`inner` with 4-bit blocks from `file`.

    `tensor` returns the original floats, not the dequantized blocks, so that a compiled model is compared with the
    original one. `locations`: offset and shape of each matrix in the file, {name: (offset, rows, columns)}. Raises
    CheckpointError if the file is too short or the blocks do not fit the checkpoint's matrices.
    """

    def __init__(self, inner: Checkpoint, file: Path, locations: Mapping[str, Sequence[int]], digest: str) -> None:
        super().__init__(inner, inner.name, inner.format)
        self._file = MappedFile(file)
        self._locations = locations
        self._digest = digest
        for name, (offset, *shape) in locations.items():
            if tuple(shape) != inner.shape(name) or type(offset) is not int or offset < 0:
                raise self._file.error(f"blocks of {name} are of another matrix: {[offset, *shape]!r:.80}")
            self._file.need(offset, _bytes(*shape), f"blocks of {name}")

    def digest(self, hash_file: HashFile | None = None) -> str:
        return digest_bytes(canonical_json([self.inner.digest(hash_file), self._digest]))

    def of_adapter(self, number: int) -> Checkpoint:
        """The inner checkpoint's: calibration changes no float."""
        return self.inner.of_adapter(number)

    def forget(self) -> None:
        super().forget()
        self._file.forget()

    def stored_form(self, name: str) -> BlockForm | None:
        return FORM if name in self._locations else super().stored_form(name)

    def unkept(self, name: str) -> str | None:
        return None if name in self._locations else super().unkept(name)

    def reordered_form(self, name: str) -> BlockForm | None:
        return None if name in self._locations else super().reordered_form(name)

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        if name not in self._locations:
            return super().quantised_blocks(name)
        offset, rows, columns = self._locations[name]
        blocks = columns // BLOCK
        pairs = np.frombuffer(self._file.buffer, np.uint8, rows * columns // 2, offset).reshape(rows, blocks, -1)
        quantized = np.empty((rows, blocks, BLOCK), np.uint8)
        quantized[..., 0::2], quantized[..., 1::2] = pairs & np.uint8(15), pairs >> np.uint8(4)
        numbers: FloatArray = np.frombuffer(self._file.buffer, "<f4", 2 * rows * blocks, offset + pairs.size)
        scale, minimum = numbers.reshape(2, rows, blocks)
        return QuantisedBlocks(FORM.type, 4, 0, quantized, scale, minimum)


def _bytes(rows: int, columns: int) -> int:
    return rows * columns // 2 + 2 * 4 * rows * (columns // BLOCK)


def packed(quantized: np.ndarray, scale: FloatArray, minimum: FloatArray) -> bytes:
    """Encode a matrix for the file."""
    return b"".join((
        np.ascontiguousarray(quantized[..., 0::2] | quantized[..., 1::2] << np.uint8(4)).tobytes(),
        scale.astype("<f4").tobytes(), minimum.astype("<f4").tobytes(),
    ))  # fmt: skip
