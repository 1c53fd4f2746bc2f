"""The contract of GGUF's types in blocks: how the bytes of one become codes, scales and minimums.

Bytes of a matrix are uint8 [N, B, S]: N rows of B blocks of S bytes, as ggml lays them out. What is read of each block
is [N, B, ...], its weights in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import FloatArray

Bytes = npt.NDArray[np.uint8]
Parts: TypeAlias = "tuple[Bytes, FloatArray, FloatArray | None]"
"""Codes, one a byte; the scale of each `form.block` of them; their minimums, None where the form has none."""


@dataclass(frozen=True)
class BlockType:
    """`stored` weights lie together; `zero` is the zero point of all codes. `split` takes the bytes of a matrix.

    Codes of fewer bits than `form.bits` are moved so that the middle of their range is that of the wider one: products
    that quantise activations, and take minimums apart, are as exact then as the codes are small about that middle.
    """

    form: BlockForm
    stored: int
    zero: int
    split: Callable[[Bytes], Parts]


def planes(packed: Bytes, run: int, bits: int) -> Bytes:
    """Numbers of `bits` each, of which 8 / bits share a byte: [N, B, S] → [N, B, S * 8 / bits].

    A run of `run` bytes holds the lowest bits of its first `run` numbers, the next bits of as many that follow.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    numbers = (packed.reshape(*packed.shape[:2], -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(*packed.shape[:2], -1)


def halves(blocks: Bytes, at: int) -> FloatArray:
    """The float16 at byte `at` of every block, as float32 [N, B, 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)
