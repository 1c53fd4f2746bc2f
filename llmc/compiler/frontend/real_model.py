"""The reference: the unmodified transformers model with a checkpoint's weights, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmc.compiler.checkpoint.base import coded_names, stored_name
from llmc.compiler.frontend.skeleton import build_skeleton
from llmc.compiler.frontend.streamed import Fill, Leaving, StreamedWeights, put_parameter
from llmc.errors import CheckpointError
from llmc.runtime.host import host_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmc.compiler.checkpoint.base import Checkpoint

STREAMED = 1 << 30
"""Bytes of a float32 model from which on its weights are not held all at once."""


def load_real_model(checkpoint: Checkpoint) -> nn.Module:
    """Load the checkpoint's model with its weights: float32, eval, transformers' own attention. Raises CheckpointError.

    A large model reads its weights as it runs (`is_streamed`), and has a `streamed` attribute (StreamedWeights).
    """
    model, fill = _unfilled(checkpoint)
    size = 4 * sum(parameter.numel() for parameter in model.state_dict().values())
    if is_streamed(checkpoint, size):
        model.streamed = StreamedWeights(model, layers_of(model), fill, checkpoint.forget)
        return model
    for name, parameter in model.state_dict().items():
        fill(name, built := torch.empty(parameter.shape))
        put_parameter(model, name, built)
    model.tie_weights()
    return model


def streamed_model(checkpoint: Checkpoint, leaving: Leaving) -> nn.Module:
    """Load a model of any size that streams its weights, and call `leaving` with each layer after all calls passed
    it."""
    model, fill = _unfilled(checkpoint)
    model.streamed = StreamedWeights(model, layers_of(model), fill, checkpoint.forget, leaving)
    return model


def is_streamed(checkpoint: Checkpoint, size: int) -> bool:
    """Whether weights of `size` bytes in float32 are read again for each token.

    Floats are from STREAMED bytes on. Quantized weights take longer to read, and are streamed only where all would fill
    half of this host's memory.
    """
    if not coded_names(checkpoint):
        return size >= STREAMED
    return size > max(STREAMED, (host_memory() or 0) // 2)


def _unfilled(checkpoint: Checkpoint) -> tuple[PreTrainedModel, Fill]:
    """A model without values, and the function that writes them, without selectable adapters."""
    checkpoint = checkpoint.of_adapter(0)
    model = build_skeleton(checkpoint.config)
    names = set(checkpoint.tensor_names())
    parameters = model.state_dict()
    stored = {name: stored_name(name, names) for name in parameters}
    for name, parameter in parameters.items():
        if (shape := checkpoint.shape(stored[name])) != tuple(parameter.shape):
            raise CheckpointError(f"tensor {name!r} has shape {shape}, the configuration says {tuple(parameter.shape)}")

    known: set[str] = set()

    def fill(name: str, tensor: Tensor) -> None:
        if name in known:
            checkpoint.fill(stored[name], tensor.numpy())
        else:
            tensor.numpy()[...] = checkpoint.tensor(stored[name])
            known.add(name)

    return model, fill


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder's layers."""
    count = model.config.num_hidden_layers
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
