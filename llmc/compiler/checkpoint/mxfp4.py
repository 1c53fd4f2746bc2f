"""Tensors stored in MXFP4, read as the floats that they stand for.

A tensor NAME [E, K, N] is stored as NAME_blocks [E, N, K/32, 16] and NAME_scales [E, N, K/32], both bytes. A byte of a
block holds two values of 4 bits (E2M1), the first in its low half; a scale s multiplies its 32 values by 2 ** (s - 127)
(E8M0; 255 is no number). Sources: OCP Microscaling Formats specification 1.0, sections 5.3.3 and 5.4.1; the names and
the order of dimensions: transformers 5.23, integrations/mxfp4.py. Every value is a float32 exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmc.compiler.checkpoint.base import FloatArray, require_finite
from llmc.compiler.checkpoint.huggingface import HuggingFaceCheckpoint
from llmc.errors import CheckpointError

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES, _BIAS, _NO_NUMBER = 16, 127, 255
_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_HALF, -_HALF])


class Mxfp4Checkpoint(HuggingFaceCheckpoint):
    """A folder in which some tensors may be stored so; without such tensors it is as any other."""

    @property
    def config(self) -> dict[str, Any]:
        """Without a quantization that tensors no longer have when they are read."""
        config = super().config
        stated = config.get("quantization_config")
        if isinstance(stated, dict) and stated.get("quant_method") == METHOD and self._blocks():
            del config["quantization_config"]
        return config

    def _blocks(self) -> set[str]:
        """Names of the tensors that are stored so. Raises CheckpointError where scales are missing."""
        stored = set(super().tensor_names())
        found = {name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)}
        for name in sorted(found):
            if name + _SCALES not in stored:
                raise CheckpointError(
                    f"{self.path}: {name}{_BLOCKS} has no {name}{_SCALES}: fetch the checkpoint again"
                )
        return found

    def tensor_names(self) -> list[str]:
        """Those that the blocks and scales stand for among them."""
        blocks = self._blocks()
        parts = {name + end for name in blocks for end in (_BLOCKS, _SCALES)}
        return sorted({*super().tensor_names(), *blocks} - parts)

    def _is_float(self, name: str) -> bool:
        return name in self._stored or name + _BLOCKS not in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the floats. Raises CheckpointError where blocks and scales do not belong together."""
        if self._is_float(name):
            return super().shape(name)
        blocks, scales = super().shape(name + _BLOCKS), super().shape(name + _SCALES)
        if len(blocks) != 4 or blocks[3] != _BYTES or blocks[:3] != scales:
            raise CheckpointError(
                f"{self.path}: {name}{_BLOCKS} is {list(blocks)} and {name}{_SCALES} {list(scales)}, not [E, N, G, "
                f"{_BYTES}] and [E, N, G] as MXFP4 is stored: fetch the checkpoint again"
            )
        experts, rows, groups, _ = blocks
        return experts, groups * 2 * _BYTES, rows

    def tensor(self, name: str) -> FloatArray:
        """The floats, an expert at a time."""
        if self._is_float(name):
            return super().tensor(name)
        made: FloatArray = np.empty(self.shape(name), np.float32)
        blocks, scales = (
            shard.bytes_of(stored) for shard, stored in (self._where(name + end) for end in (_BLOCKS, _SCALES))
        )
        if scales.size and scales.max() == _NO_NUMBER:
            raise CheckpointError(
                f"{self.path}: {name}{_SCALES} holds a scale of {_NO_NUMBER}, which is no number: fetch it again"
            )
        for expert, (codes, exponents) in enumerate(zip(blocks, scales, strict=True)):
            values = _VALUES[np.stack([codes & 15, codes >> 4], -1)].reshape(*exponents.shape, -1)
            with np.errstate(over="ignore"):
                scaled = np.ldexp(values, exponents.astype(np.int32)[..., None] - _BIAS)
            made[expert] = scaled.reshape(made.shape[2], -1).T
        return require_finite(made, name, self.path)
