"""Size of a checkpoint's model: from its tensors, or from its configuration if it has none."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from llmc.compiler.architectures.shared.architectures import size_of
from llmc.compiler.architectures.shared.experts import EXPERTS
from llmc.compiler.architectures.shared.names import EMBED_LM_HEAD
from llmc.compiler.architectures.shared.size import Weights
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.block_form import BlockForm
    from llmc.compiler.checkpoint.base import Checkpoint


def weights_of(checkpoint: Checkpoint) -> list[Weights]:
    """All weights of a checkpoint's tensors, grouped by kind; empty for a configuration alone."""
    found: Counter[tuple[BlockForm | None, bool, bool]] = Counter()
    for name in checkpoint.tensor_names():
        form = checkpoint.stored_form(name) or checkpoint.reordered_form(name)
        found[form, name in EMBED_LM_HEAD, EXPERTS in name] += prod(checkpoint.shape(name))
    return [Weights(count, *kind) for kind, count in found.items()]


def weights_in(checkpoint: Checkpoint) -> list[Weights]:
    """`weights_of` a checkpoint; for a configuration alone the weights of its sizes, or none where it has no sizes."""
    found = weights_of(checkpoint)
    if found:
        return found
    try:
        return size_of(checkpoint.config, checkpoint.name or "config.json").weights
    except CheckpointError:
        return []
