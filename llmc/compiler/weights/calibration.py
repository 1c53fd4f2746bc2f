"""What a text says about a model's matrices, and the 4-bit blocks that follow from it.

The model runs over the text in float32, layer by layer (frontend/replay.py), and beside it the model of the blocks made
so far. Matrices that read one input are put into blocks together (gptq.py), by what that input is in the quantised
model; those that come later see what these give.

For a bound on the divergence some matrices stay in 8 bits (mixed.py). What 4 bits of each group of matrices cost is
measured with the float model in which these alone are quantised, over one sequence; and the whole quantised model reads
another text, which is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from llmc.compiler.checkpoint.calibrated import BLOCK, packed
from llmc.compiler.frontend.replay import ReplayedModel, Way
from llmc.compiler.weights.gptq import Inputs, gptq4
from llmc.compiler.weights.mixed import Cost
from llmc.compiler.weights.nbits import quantise_q4
from llmc.compiler.weights.recipes import quantise_q8
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.weights.nbits import Array, Codes
    from llmc.compiler.weights.recipes import Sink

TOKENS, LENGTH = 8192, 256
"""Of the text: as many at most, in sequences that are so long."""


@dataclass(frozen=True)
class Text:
    """Sequences of tokens: those that choose codes, the first of which costs are measured over; and those that the
    quantised model is judged by, none where it is not, from the token `first` on. `rounds`: codes are the nearest ones
    instead."""

    sequences: Sequence[Sequence[int]]
    judged: Sequence[Sequence[int]] = ()
    first: int = 0
    rounds: bool = False


@dataclass(frozen=True)
class Calibrated:
    """`places`: where the blocks of each matrix lie, as calibrated.py has it. Of a model that was judged: `costs` of
    4 bits, and the mean `divergence`, in nats."""

    places: dict[str, tuple[int, int, int]]
    costs: tuple[Cost, ...] = ()
    divergence: float = 0.0


def calibrate(
    checkpoint: Checkpoint, text: Text, out: Sink, wide: frozenset[str] = frozenset(),
    tell: Callable[[int, int], None] = lambda *_: None,
) -> Calibrated:  # fmt: skip
    """Write the blocks of every projection in a layer whose rows they divide, and that the checkpoint does not store in
    4 bits; those of `wide` stay in 8 bits. `tell`: how many of how many layers are done. Raises CheckpointError where
    there is none, and for weights that are no numbers."""
    return _Calibration(checkpoint, text, out, wide, tell).run()


@dataclass
class _Group:
    """Matrices that read one input, by name."""

    modules: dict[Any, str] = field(default_factory=dict)

    def split(self, weight: Array) -> dict[nn.Module, Tensor]:
        """The matrices of `weight`, [N, K], which has them one above the other."""
        heights = [module.out_features for module in self.modules]
        return dict(zip(self.modules, torch.from_numpy(weight).split(heights), strict=True))


class _Calibration:
    def __init__(
        self, checkpoint: Checkpoint, text: Text, out: Sink, wide: frozenset[str], tell: Callable[[int, int], None]
    ) -> None:
        self._checkpoint, self._text, self._out, self._wide, self._tell = checkpoint, text, out, wide, tell
        self._senses = bool(text.judged) and not wide
        chosen = text.sequences[: int(self._senses)] if text.rounds else text.sequences
        self._judged, self._calls = len(text.judged), [*text.judged, *chosen]
        self._ways = [Way(call) for call in range(self._judged if text.rounds else len(self._calls))]
        self._alone: list[tuple[_Group, Way]] = []
        self._groups: list[_Group] = []
        self._last: tuple[Tensor, _Group] | None = None
        self._replaying = False
        self._places: dict[str, tuple[int, int, int]] = {}
        self._end = self._layers = self._quantised = 0
        self._replayed = ReplayedModel(checkpoint, self._leaving)
        self._names = {module: f"{name}.weight" for name, module in self._replayed.model.named_modules()}
        for layer in self._replayed.layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear) and module.in_features % BLOCK == 0:
                    form = checkpoint.stored_form(self._names[module])
                    if form is None or form.bits != 4:
                        module.register_forward_pre_hook(self._watch)

    def run(self) -> Calibrated:
        predicted = self._replayed.run(self._calls, self._judged + self._senses)
        if not self._quantised:
            raise CheckpointError(
                f"{self._checkpoint.path}: every projection is in 4-bit blocks already, or has rows of no multiple of "
                f"{BLOCK}: there is nothing to calibrate"
            )
        costs = []
        for group, way in self._alone:
            names, weights = tuple(group.modules.values()), sum(module.weight.numel() for module in group.modules)
            costs.append(Cost(names, weights, float(self._divergence(way, predicted[self._judged]).mean())))
        rows = [self._divergence(self._ways[at], predicted[at])[self._text.first :] for at in range(self._judged)]
        return Calibrated(self._places, tuple(costs), float(torch.cat(rows).mean()) if rows else 0.0)

    def _divergence(self, way: Way, logits: Tensor) -> Tensor:
        """KL(logits ‖ what the way ends in) of each token, [n]."""
        p, q = (torch.log_softmax(x, -1) for x in (logits, self._replayed.tail(self._calls[way.of], way)))
        return (p.exp() * (p - q)).sum(-1)

    def _watch(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Projections of one input are a group: query, key and value, gate and up."""
        if self._replaying:
            return
        if self._last is not None and self._last[0] is given[0]:
            group = self._last[1]
        else:
            group = next((g for g in self._groups if module in g.modules), None) or _Group()
        if not group.modules:
            self._groups.append(group)
        group.modules[module] = self._names[module]
        self._last = given[0], group

    def _leaving(self, layer: nn.Module) -> None:
        self._replaying = True
        made: dict[nn.Module, Tensor] = {}
        for group in self._groups:
            made |= group.split(self._values(layer, group, made))
        for _, way in self._alone:
            self._replayed.through(layer, way)
        if self._senses:
            for group in self._groups:
                way = Way(self._judged)
                self._replayed.through(layer, way, {module: made[module] for module in group.modules})
                self._alone.append((group, way))
        for way in self._ways:
            self._replayed.through(layer, way, made)
        self._layers += 1
        self._quantised += len(made)
        self._groups, self._last, self._replaying = [], None, False
        self._tell(self._layers, len(self._replayed.layers))

    def _values(self, layer: nn.Module, group: _Group, made: Mapping[nn.Module, Tensor]) -> Array:
        """The matrices of a group as they are quantised, [N, K]; `made`: those before it in the layer."""
        weight = np.concatenate([module.weight.detach().numpy() for module in group.modules])
        if not np.isfinite(weight).all():
            raise CheckpointError(
                f"{self._checkpoint.path}: of {', '.join(group.modules.values())} some values are no numbers; get the "
                "checkpoint again"
            )
        if self._wide.issuperset(group.modules.values()):
            codes, scales = quantise_q8(weight, BLOCK)
            minimums = scales * np.float32(-128)
        elif self._text.rounds:
            codes, scales, offsets = quantise_q4(weight, BLOCK)
            minimums = offsets - scales * np.float32(8)
        else:
            codes, scales, minimums = gptq4(weight, self._inputs(layer, group, made), BLOCK)
            self._write(group, codes, scales, minimums)
        values: Array = codes * scales[..., None] + minimums[..., None]
        return values.reshape(weight.shape)

    def _inputs(self, layer: nn.Module, group: _Group, made: Mapping[nn.Module, Tensor]) -> Inputs:
        first = next(iter(group.modules))
        products = torch.zeros(first.in_features, first.in_features)

        def seen(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            raise _SeenError(given[0])

        hook = first.register_forward_pre_hook(seen)
        for way in self._ways[self._judged :]:
            try:
                self._replayed.through(layer, way.branch(), made)
            except _SeenError as found:
                rows = found.inputs.reshape(-1, first.in_features)
                products.addmm_(rows.T, rows)
        hook.remove()
        return Inputs.of(products.numpy())

    def _write(self, group: _Group, codes: Codes, scales: Array, minimums: Array) -> None:
        start = 0
        for module, name in group.modules.items():
            rows = slice(start, start := start + module.out_features)
            data = packed(codes[rows], scales[rows], minimums[rows])
            self._places[name] = (self._end, module.out_features, module.in_features)
            self._out.write(data)
            self._end += len(data)


class _SeenError(Exception):
    """A layer need not go on: the input of a matrix is there."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def sequences_of(tokens: Sequence[int], longest: int) -> list[list[int]]:
    """A text's first TOKENS tokens in sequences of LENGTH, or as long as the model takes them."""
    size = min(LENGTH, longest)
    kept = list(tokens[:TOKENS])
    return [kept[start : start + size] for start in range(0, len(kept), size) if len(kept) - start >= min(size, 8)]
