"""Measure the mean KL divergence per token of a quantized model, and of each matrix group in 4 bits alone.

The model runs in float32, layer by layer (frontend/replay.py). With it run the quantized model over the judged text,
and over one probe sequence a model per group in which only that group is in 4-bit blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from llmc.compiler.architectures.shared.names import EMBED_LM_HEAD
from llmc.compiler.checkpoint.base import stored_name
from llmc.compiler.checkpoint.calibrated import BLOCK
from llmc.compiler.frontend.replay import ReplayedModel, Way, replaced
from llmc.compiler.weights.calibration import Groups, MatrixGroup
from llmc.compiler.weights.mixed import GroupCost
from llmc.compiler.weights.nbits import q4_values
from llmc.compiler.weights.recipes import quantise_q8

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.weights.calibration import OnLayer
    from llmc.compiler.weights.nbits import Array


class EmbedLmHead:
    """Rounds the embedding and lm_head of `replayed` to 4-bit blocks in the calls from number `first` on.

    The embedding is rounded where it runs, lm_head in `tail`. Matrices whose rows are no whole number of blocks, or
    that the checkpoint stores in 4 bits, stay as they are. A second float copy of each is kept, since both run again
    after all layers.
    """

    def __init__(self, checkpoint: Checkpoint, replayed: ReplayedModel, first: int) -> None:
        self._checkpoint, self._replayed, self._first = checkpoint, replayed, first
        self._values: dict[str, Tensor] = {}
        self._names: dict[nn.Module, str] = {}
        """Names in the checkpoint: a tied lm_head has the embedding's."""
        self.weights = 0
        known = checkpoint.tensor_names()
        modules = {module: f"{name}.weight" for name, module in replayed.model.named_modules()}
        for module in (replayed.model.get_input_embeddings(), replayed.model.get_output_embeddings()):
            if modules.get(module) not in EMBED_LM_HEAD:
                continue
            name = stored_name(modules[module], known)
            form, (height, width) = checkpoint.stored_form(name), checkpoint.shape(name)
            if width % BLOCK == 0 and (form is None or form.bits != 4):
                self.weights += 0 if name in self._names.values() else height * width
                self._names[module] = name
                module.register_forward_hook(self._rounded)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._names.values()))

    def _rounded(self, module: nn.Module, given: tuple[Any, ...], _: object) -> Tensor | None:
        if self._replayed.call < self._first:
            return None
        name = self._names[module]
        if name not in self._values:
            self._values[name] = torch.from_numpy(q4_values((name,), self._checkpoint, BLOCK))
        with replaced({module: self._values[name]}):
            built: Tensor = module.forward(*given)
        return built


@dataclass(frozen=True)
class Judged:
    """Sequences on which a quantized model is judged, each from its token `first` on."""

    sequences: Sequence[Sequence[int]]
    first: int


def divergence(
    checkpoint: Checkpoint, judged: Judged, wide: frozenset[str], probe: Sequence[int],
    on_progress: OnLayer = lambda *_: None,    *, embed_lm_head: bool = False,
) -> tuple[float, list[GroupCost]]:  # fmt: skip
    """Return mean KL(float ‖ quantized) in nats, and the cost of each group over the sequence `probe`.

    Projections are in 4-bit blocks: the checkpoint's own, or the nearest ones. Projections of `wide` are in 8 bits.
    With `embed_lm_head`, embedding and lm_head are quantized as well, or stay in floats if they are in `wide`. An empty
    `probe` gives no costs. Raises CheckpointError if no projection can be quantized, or if a weight is NaN or infinite.
    """
    calls = [*judged.sequences, *([probe] if probe else [])]
    count = len(judged.sequences)
    alone = list[tuple[tuple[str, ...], int, Way]]()
    done = 0

    def leaving(layer: nn.Module) -> None:
        nonlocal done
        built: dict[nn.Module, Tensor] = {}
        for _, _, way in alone:
            replayed.through(layer, way)
        for group in groups.take():
            weight = group.weight()
            own = group.split(_values(checkpoint, group, weight, eight=wide.issuperset(group.names)))
            built |= own
            if probe:
                replayed.through(layer, way := Way(count), own)
                alone.append((group.names, weight.size, way))
        for way in ways:
            replayed.through(layer, way, built)
        groups.watch()
        done += 1
        on_progress(done, len(replayed.layers))

    def apart(way: Way) -> Tensor:
        """KL of each token, [n]."""
        of = way.of % len(calls)
        p, q = (torch.log_softmax(x, -1) for x in (predicted[of], replayed.tail(calls[of], way)))
        return (p.exp() * (p - q)).sum(-1)

    replayed = ReplayedModel(checkpoint, leaving)
    groups = Groups(checkpoint, replayed)
    first = 0
    if embed_lm_head:  # repeat the same calls with the embedding in 4 bits
        rounded = EmbedLmHead(checkpoint, replayed, len(calls))
        first = 0 if wide.issuperset(rounded.names) else len(calls)
        if first and probe:
            alone.append((rounded.names, rounded.weights, Way(first + count)))
    ways = [Way(first + call) for call in range(count)]
    predicted = replayed.run(calls * 2 if first else calls, len(calls))
    groups.require_any()
    costs = [GroupCost(names, weights, float(apart(way).mean())) for names, weights, way in alone]
    return float(torch.cat([apart(way)[judged.first :] for way in ways]).mean()), costs


def _values(checkpoint: Checkpoint, group: MatrixGroup, weight: Array, *, eight: bool) -> Array:
    if not eight:
        return q4_values(group.names, checkpoint, BLOCK)
    quantized, scales = quantise_q8(weight, BLOCK)
    values: Array = (quantized.astype(np.float32) - 128) * scales[..., None]
    return values.reshape(weight.shape)
