"""Choose the 4-bit blocks of a model's matrices by calibration on a text.

The model runs over the text in float32, layer by layer (frontend/replay.py), next to the model with the blocks chosen
so far. Matrices that read one input are quantized together (GPTQ), from that input in the quantized model. Later
matrices see the outputs of earlier quantized ones.

GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323) minimises the change of the matmul. It rounds one column
after another and compensates each rounding error in the remaining columns, for typical inputs. Two options of the
authors' code are used: columns with the largest inputs come first ("act-order"), and scales and minimums are fitted
beforehand ("static groups"). Here that fit weights the error of a weight by the mean square of its input. Damping is
relative for each input, because a short text tells more about the size of an input than about its correlations.
benchmarks/RESULTS.md has the errors of 12 matrices of SmolLM2-135M on other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmc.compiler.architectures.shared.experts import is_router
from llmc.compiler.checkpoint.calibrated import BLOCK, FORM, packed
from llmc.compiler.frontend.replay import ReplayedModel, Way
from llmc.compiler.weights.nbits import Array, quantise_q4
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.weights.recipes import Sink


@dataclass
class MatrixGroup:
    """Matrices that read one input: module → tensor name, stacked by rows. Targets fuse query, key and value, and gate
    and up, so they must share a format."""

    modules: dict[Any, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.modules.values())

    @property
    def width(self) -> int:
        return int(next(iter(self.modules)).in_features)

    def weight(self) -> Array:
        """The stacked weights [N, K]. Raises CheckpointError if one is NaN or infinite."""
        found = np.concatenate([module.weight.detach().numpy() for module in self.modules])
        if not np.isfinite(found).all():
            raise CheckpointError(
                f"{', '.join(self.names)}: some weights are NaN or infinite; fetch the checkpoint again"
            )
        return found

    def split(self, weight: Array) -> dict[nn.Module, Tensor]:
        heights = [module.out_features for module in self.modules]
        return dict(zip(self.modules, torch.from_numpy(weight).split(heights), strict=True))


class Groups:
    """Finds the matrix groups of the layer that currently runs. Counted are linear modules whose rows are whole blocks.
    Routers and matrices that the checkpoint stores in 4 bits are left out."""

    def __init__(self, checkpoint: Checkpoint, replayed: ReplayedModel) -> None:
        self._found: list[MatrixGroup] = []
        self._last: tuple[Tensor, MatrixGroup] | None = None
        self._watches = True
        self._path = checkpoint.path
        self._any = False
        self._names = {module: f"{name}.weight" for name, module in replayed.model.named_modules()}
        for layer in replayed.layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear) and module.in_features % BLOCK == 0:
                    name = self._names[module]
                    form = checkpoint.stored_form(name) or checkpoint.reordered_form(name)
                    if not is_router(name) and (form is None or form.bits != 4 or form == FORM):
                        module.register_forward_pre_hook(self._watch)

    def take(self) -> list[MatrixGroup]:
        """Return the groups found since the last call, in the order of their inputs; stop looking until `watch`."""
        found, self._found, self._last, self._watches = self._found, [], None, False
        self._any = self._any or bool(found)
        return found

    def watch(self) -> None:
        self._watches = True

    def require_any(self) -> None:
        if not self._any:
            raise CheckpointError(
                f"{self._path}: there is nothing to calibrate: every projection is stored in 4-bit blocks already, or "
                f"its row length is not a multiple of {BLOCK}"
            )

    def _watch(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if not self._watches:
            return
        if self._last is not None and self._last[0] is given[0]:
            group = self._last[1]
        else:
            group = next((g for g in self._found if module in g.modules), None) or MatrixGroup()
        if not group.modules:
            self._found.append(group)
        group.modules[module] = self._names[module]
        self._last = given[0], group


DAMPING = 0.1
"""Fraction of each diagonal value of the sum of x xᵀ that is added to it."""
_LEAST = 1e-4
"""Lower bound of an input's mean square, as a fraction of the mean over all inputs."""
_TOP = 15
_LAZY = 64
"""Number of columns after which their compensation is applied to all remaining columns."""


@dataclass(frozen=True)
class Inputs:
    """Statistics of a matrix's inputs.

    `squares` [K]: the mean square of each input, up to a common factor. `order` [K]: the order of the columns.
    `follows` [K, K]: the upper Cholesky factor of the inverse of the damped sum of x xᵀ, in that order.
    """

    squares: Array
    order: NDArray[np.intp]
    follows: Array

    @classmethod
    def of(cls, matmuls: Array) -> Inputs:
        """Compute the statistics from the sum of x xᵀ over inputs x, [K, K]."""
        squares = np.diagonal(matmuls)
        order = np.argsort(-squares, kind="stable")
        damped = matmuls[np.ix_(order, order)].astype(np.float64)
        diagonal = np.einsum("ii->i", damped)
        squares = np.maximum(squares, _LEAST * squares.mean() or 1)
        diagonal[:] = squares[order] * (1 + DAMPING)
        inverse = np.linalg.inv(damped)
        return cls(squares, order, np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32))


def gptq4(weight: Array, inputs: Inputs, block: int) -> tuple[NDArray[np.uint8], Array, Array]:
    """Quantize `weight` [N, K] to 4 bits with GPTQ; K is a multiple of `block`.

    Returns quantized weights uint8 [N, K/block, block], and scales and minimums float32 [N, K/block] that float16 holds
    exactly: w ≈ scale · q + minimum.
    """
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
"""The calibration text is cut after TOKENS tokens, into sequences of LENGTH tokens."""
OnLayer = Callable[[int, int], None]
"""Takes the number of finished layers and the number of all layers."""


def calibrate(
    checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], out: Sink, on_progress: OnLayer = lambda *_: None
) -> dict[str, tuple[int, int, int]]:  # fmt: skip
    """Write 4-bit blocks of the model's projections to `out`, and return the location of each matrix.

    Left out are projections whose rows are no whole number of blocks, and those that the checkpoint stores in 4 bits.
    Locations have the form that checkpoint/calibrated.py reads. Raises CheckpointError if no projection remains, or if
    a weight is NaN or infinite.
    """
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
        on_progress(done, len(replayed.layers))

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
    """The sum of x xᵀ over inputs x of a group, [K, K]; `built` replaces earlier matrices of the layer."""
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
    """Stops a layer once the input of a matrix is known."""


def sequences_of(tokens: Sequence[int], longest: int) -> list[list[int]]:
    """Cut the first TOKENS tokens of a text into sequences of LENGTH tokens, or of `longest` if that is less."""
    size = min(LENGTH, longest)
    kept = list(tokens[:TOKENS])
    return [kept[start : start + size] for start in range(0, len(kept), size) if len(kept) - start >= min(size, 8)]
