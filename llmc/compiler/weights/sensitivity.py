"""Measure the mean KL divergence per token of a quantized model, and of each matrix group in 4 bits alone.

The model runs in float32, layer by layer (frontend/replay.py). With it run the quantized model over the judged text,
and over one probe sequence a model per group in which only that group is in 4-bit blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from llmc.compiler.checkpoint.calibrated import BLOCK
from llmc.compiler.frontend.replay import ReplayedModel, Way
from llmc.compiler.weights.embed_lm_head import EmbedLmHead
from llmc.compiler.weights.groups import Groups, MatrixGroup
from llmc.compiler.weights.mixed import GroupCost
from llmc.compiler.weights.nbits import q4_values
from llmc.compiler.weights.recipes import quantise_q8

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.weights.calibration import OnLayer
    from llmc.compiler.weights.nbits import Array


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
