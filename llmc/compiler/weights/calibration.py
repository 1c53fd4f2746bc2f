"""What a text says about a model's matrices, and the 4-bit blocks that follow from it.

The model runs over the text in float32, layer by layer (frontend/replay.py), and beside it the model of the blocks made
so far. Matrices that read one input are put into blocks together (gptq.py), by what that input is in the quantised
model; those that come later see what these give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llmc.compiler.checkpoint.calibrated import BLOCK, packed
from llmc.compiler.frontend.replay import ReplayedModel, Way
from llmc.compiler.weights.gptq import Inputs, gptq4
from llmc.compiler.weights.groups import Group, Groups

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.weights.recipes import Sink

TOKENS, LENGTH = 8192, 256
"""Of the text: as many at most, in sequences that are so long."""
Tell = Callable[[int, int], None]
"""Takes how many of how many layers are done."""


def calibrate(
    checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], out: Sink, tell: Tell = lambda *_: None
) -> dict[str, tuple[int, int, int]]:  # fmt: skip
    """Write the blocks of every projection in a layer whose rows they divide, and that the checkpoint does not store in
    4 bits; returns where each matrix lies, as calibrated.py has it. Raises CheckpointError where there is none, and for
    weights that are no numbers."""
    places: dict[str, tuple[int, int, int]] = {}
    ways = [Way(call) for call in range(len(sequences))]
    end = done = 0

    def leaving(layer: nn.Module) -> None:
        nonlocal end, done
        made: dict[nn.Module, Tensor] = {}
        for group in groups.take():
            weight, products = group.weight(), _products(replayed, layer, group, ways, made)
            codes, scales, minimums = gptq4(weight, Inputs.of(products.numpy()), BLOCK)
            made |= group.split((codes * scales[..., None] + minimums[..., None]).reshape(weight.shape))
            start = 0
            for module, name in group.modules.items():
                rows = slice(start, start := start + module.out_features)
                places[name] = (end, module.out_features, group.width)
                data = packed(codes[rows], scales[rows], minimums[rows])
                out.write(data)
                end += len(data)
        for way in ways:
            replayed.through(layer, way, made)
        groups.watch()
        done += 1
        tell(done, len(replayed.layers))

    replayed = ReplayedModel(checkpoint, leaving)
    groups = Groups(checkpoint, replayed)
    replayed.run(sequences, 0)
    groups.require_any()
    return places


def _products(
    replayed: ReplayedModel, layer: nn.Module, group: Group, ways: Sequence[Way], made: Mapping[nn.Module, Tensor]
) -> Tensor:
    """The sum of x xᵀ over inputs x of a group, [K, K], where matrices before it in the layer are as `made`."""
    products = torch.zeros(group.width, group.width)

    def seen(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        rows = given[0].reshape(-1, group.width)
        products.addmm_(rows.T, rows)
        raise _SeenError

    hook = next(iter(group.modules)).register_forward_pre_hook(seen)
    for way in ways:
        with suppress(_SeenError):
            replayed.through(layer, way.branch(), made)
    hook.remove()
    return products


class _SeenError(Exception):
    """A layer need not go on: the input of a matrix is there."""


def sequences_of(tokens: Sequence[int], longest: int) -> list[list[int]]:
    """A text's first TOKENS tokens in sequences of LENGTH, or as long as the model takes them."""
    size = min(LENGTH, longest)
    kept = list(tokens[:TOKENS])
    return [kept[start : start + size] for start in range(0, len(kept), size) if len(kept) - start >= min(size, 8)]
