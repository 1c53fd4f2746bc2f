"""What a text says about a model's matrices, and the 4-bit blocks that follow from it.

The model runs over the text in float32, layer by layer (frontend/streamed.py). Of every projection in a layer the
products of its inputs are summed, and when the whole text went through the layer its matrices are put into blocks
(gptq.py). Later layers see what the unquantised ones gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmc.compiler.checkpoint.calibrated import BLOCK, packed
from llmc.compiler.frontend.real_model import layers_of, streamed_model
from llmc.compiler.weights.gptq import Inputs, gptq4
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.weights.recipes import Sink

TOKENS, LENGTH = 8192, 256
"""Of the text: as many at most, in sequences that are so long."""


def calibrate(
    checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], out: Sink
) -> dict[str, tuple[int, int, int]]:  # fmt: skip
    """Write the blocks of every projection in a layer whose rows they divide, and that the checkpoint does not store in
    4 bits; returns where each matrix lies, as calibrated.py has it. Raises CheckpointError where there is none."""
    places: dict[str, tuple[int, int, int]] = {}
    seen: dict[nn.Module, _Products] = {}
    end = 0

    def leaving(name: str, unit: nn.Module) -> None:
        nonlocal end
        for part, module in unit.named_modules():
            products = seen.pop(module, None)
            if products is None:
                continue
            weight: Any = module.weight
            data = packed(*gptq4(weight.detach().numpy(), products.inputs, BLOCK))
            places[f"{name}.{part}.weight"] = (end, *weight.shape)
            out.write(data)
            end += len(data)

    model: Any = streamed_model(checkpoint, leaving)
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    last: list[tuple[Tensor, _Products]] = []

    def watch(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Projections of one input share its products: query, key and value, gate and up."""
        if last and last[0][0] is given[0]:
            products = last[0][1]
        else:
            products = seen.get(module) or _Products(given[0].shape[-1])
            products.add(given[0])
        last[:] = [(given[0], products)]
        seen[module] = products

    for layer in layers_of(model):
        for module in layer.modules():
            if isinstance(module, nn.Linear) and module.in_features % BLOCK == 0:
                form = checkpoint.stored_form(names[module])
                if form is None or form.bits != 4:
                    module.register_forward_pre_hook(watch)
    keep = torch.zeros(1, dtype=torch.long)

    def run(tokens: Sequence[int]) -> None:
        with torch.inference_mode():
            model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=keep)

    model.streamed.side_by_side([partial(run, tokens) for tokens in sequences])
    if not places:
        raise CheckpointError(
            f"{checkpoint.path}: every projection is in 4-bit blocks already, or has rows of no multiple of {BLOCK}: "
            "there is nothing to calibrate"
        )
    return places


class _Products:
    """The sum of x xᵀ over inputs x, [K, K]."""

    def __init__(self, width: int) -> None:
        self._sum = torch.zeros(width, width)

    def add(self, inputs: Tensor) -> None:
        rows = inputs.reshape(-1, inputs.shape[-1])
        self._sum.addmm_(rows.T, rows)

    @cached_property
    def inputs(self) -> Inputs:
        """Once they are all added."""
        return Inputs.of(self._sum.numpy())


def sequences_of(tokens: Sequence[int], longest: int) -> list[list[int]]:
    """A text's first TOKENS tokens in sequences of LENGTH, or as long as the model takes them."""
    size = min(LENGTH, longest)
    kept = list(tokens[:TOKENS])
    return [kept[start : start + size] for start in range(0, len(kept), size) if len(kept) - start >= min(size, 8)]
