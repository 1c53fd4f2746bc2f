"""What a text says about a model's matrices, and the 4-bit blocks that follow from it.

The model runs over the text in float32, layer by layer (frontend/replay.py), and beside it the model of the blocks made
so far. Matrices that read one input are put into blocks together (GPTQ), by what that input is in the quantised
model; those that come later see what these give.

The blocks are chosen so that products of the matrix change least. GPTQ (Frantar et al. 2022,
https://arxiv.org/abs/2210.17323): columns are rounded one after another, and what a column's rounding changes in the
products of typical inputs is made up for by the columns that are left. Those whose inputs are largest come first, and
scales and minimums are fitted before; both are options of the authors' code ("act-order", "static groups"). Here that
fit counts the error of a weight by the mean square of its input, and damping is relative for each input: a short text
says more about how large an input is than about what it goes together with. On inputs that were not calibrated with, 12
matrices of SmolLM2-135M have the errors of benchmarks/RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmc.compiler.checkpoint.calibrated import BLOCK, packed
from llmc.compiler.frontend.replay import ReplayedModel, Way
from llmc.compiler.weights.groups import Groups, MatrixGroup
from llmc.compiler.weights.nbits import quantise_q4

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.weights.recipes import Sink

Array = NDArray[np.float32]

DAMPING = 0.1
"""Of each value on the products' diagonal, added to it."""
_LEAST = 1e-4
"""Of the mean of that diagonal, which an input counts at least."""
_TOP = 15
_LAZY = 64
"""Columns after which what they changed is taken to all that are left."""


@dataclass(frozen=True)
class Inputs:
    """What the inputs of a matrix say: the mean square of each, to a factor [K], the order of its columns [K], and the
    upper Cholesky factor of the inverse of their damped products, in that order [K, K]."""

    squares: Array
    order: NDArray[np.intp]
    follows: Array

    @classmethod
    def of(cls, matmuls: Array) -> Inputs:
        """By the sum of x xᵀ over inputs x, [K, K]."""
        squares = np.diagonal(matmuls)
        order = np.argsort(-squares, kind="stable")
        damped = matmuls[np.ix_(order, order)].astype(np.float64)
        diagonal = np.einsum("ii->i", damped)
        squares = np.maximum(squares, _LEAST * squares.mean() or 1)
        diagonal[:] = squares[order] * (1 + DAMPING)
        inverse = np.linalg.inv(damped)
        return cls(squares, order, np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32))


def gptq4(weight: Array, inputs: Inputs, block: int) -> tuple[NDArray[np.uint8], Array, Array]:
    """Codes uint8 [N, K/block, block], scales and minimums float32 [N, K/block] of `weight` [N, K], K a multiple of
    `block`: w ≈ scale · code + minimum, which float16 holds."""
    rows, width = weight.shape
    _, scales, offsets = quantise_q4(weight, block, inputs.squares)
    scales, minimums = _half(scales), _half(offsets - np.float32(8) * scales)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    order, follows = inputs.order, inputs.follows
    scales_of, minimums_of, inverse_of = (np.ascontiguousarray(x.T) for x in (scales, minimums, inverse))
    left = np.ascontiguousarray(weight.T[order])  # a column of the matrix is a row here
    quantized = np.empty((width, rows), np.uint8)
    for start in range(0, width, _LAZY):
        own = left[start : start + _LAZY]
        errors = np.empty_like(own)
        for at in range(len(own)):
            column = order[start + at]
            scale, minimum = scales_of[column // block], minimums_of[column // block]
            code = np.clip(np.rint((own[at] - minimum) * inverse_of[column // block]), 0, _TOP)
            quantized[column] = code
            step = follows[start + at, start + at : start + len(own)]
            errors[at] = (own[at] - (scale * code + minimum)) / step[0]
            own[at + 1 :] -= step[1:, None] * errors[at]
        left[start + _LAZY :] -= follows[start : start + _LAZY, start + _LAZY :].T @ errors
    return np.ascontiguousarray(quantized.T).reshape(rows, -1, block), scales, minimums


def _half(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


TOKENS, LENGTH = 8192, 256
"""Of the text: as many at most, in sequences that are so long."""
Report = Callable[[int, int], None]
"""Takes how many of how many layers are done."""


def calibrate(
    checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], out: Sink, tell: Report = lambda *_: None
) -> dict[str, tuple[int, int, int]]:  # fmt: skip
    """Write the blocks of every projection in a layer whose rows they divide, and that the checkpoint does not store in
    4 bits; returns where each matrix lies, as calibrated.py has it. Raises CheckpointError where there is none, and for
    weights that are no numbers."""
    matrices: dict[str, tuple[int, int, int]] = {}
    ways = [Way(call) for call in range(len(sequences))]
    end = done = 0

    def leaving(layer: nn.Module) -> None:
        nonlocal end, done
        built: dict[nn.Module, Tensor] = {}
        for group in groups.take():
            weight, matmuls = group.weight(), _matmuls(replayed, layer, group, ways, built)
            quantized, scales, minimums = gptq4(weight, Inputs.of(matmuls.numpy()), BLOCK)
            built |= group.split((quantized * scales[..., None] + minimums[..., None]).reshape(weight.shape))
            start = 0
            for module, name in group.modules.items():
                rows = slice(start, start := start + module.out_features)
                matrices[name] = (end, module.out_features, group.width)
                data = packed(quantized[rows], scales[rows], minimums[rows])
                out.write(data)
                end += len(data)
        for way in ways:
            replayed.through(layer, way, built)
        groups.watch()
        done += 1
        tell(done, len(replayed.layers))

    replayed = ReplayedModel(checkpoint, leaving)
    groups = Groups(checkpoint, replayed)
    replayed.run(sequences, 0)
    groups.require_any()
    return matrices


def _matmuls(
    replayed: ReplayedModel,
    layer: nn.Module,
    group: MatrixGroup,
    ways: Sequence[Way],
    built: Mapping[nn.Module, Tensor],
) -> Tensor:
    """The sum of x xᵀ over inputs x of a group, [K, K], where matrices before it in the layer are as `built`."""
    matmuls = torch.zeros(group.width, group.width)

    def seen(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        rows = given[0].reshape(-1, group.width)
        matmuls.addmm_(rows.T, rows)
        raise _SeenError

    hook = next(iter(group.modules)).register_forward_pre_hook(seen)
    for way in ways:
        with suppress(_SeenError):
            replayed.through(layer, way.branch(), built)
    hook.remove()
    return matmuls


class _SeenError(Exception):
    """A layer need not go on: the input of a matrix is there."""


def sequences_of(tokens: Sequence[int], longest: int) -> list[list[int]]:
    """A text's first TOKENS tokens in sequences of LENGTH, or as long as the model takes them."""
    size = min(LENGTH, longest)
    kept = list(tokens[:TOKENS])
    return [kept[start : start + size] for start in range(0, len(kept), size) if len(kept) - start >= min(size, 8)]
