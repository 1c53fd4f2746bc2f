"""The unmodified transformers model, built from its configuration alone: weights have shapes but no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from llmc.compiler.architectures import require_supported
from llmc.compiler.checkpoint.base import stored_name
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint


def model_config(config: Mapping[str, Any]) -> PretrainedConfig:
    """The transformers configuration object of an HF-style `config` dict; raises CheckpointError."""
    model_type = require_supported(config)
    fields = {
        k: v for k, v in config.items() if k not in ("model_type", "transformers_version", "dtype", "torch_dtype")
    }
    transformers_logging.set_verbosity_error()
    try:
        return AutoConfig.for_model(model_type, **fields)
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as e:
        raise CheckpointError(f"the model configuration is not a valid {model_type} configuration: {e}") from e


def build_skeleton(config: Mapping[str, Any], attention: str) -> nn.Module:
    """A `…ForCausalLM` in eval mode whose parameters are on the meta device and whose buffers are real.

    `attention` is the name of a registered attention function. Buffers (rotary frequencies) are computed, since
    they come from the configuration rather than from the checkpoint.
    """
    hf_config = model_config(config)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    model.eval().requires_grad_(False)
    model.set_attn_implementation(attention)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if any(b.is_meta for b in child.buffers(recurse=False)):
                setattr(parent, name, _rebuild(child))
    return model


def _rebuild(module: nn.Module) -> nn.Module:
    config = getattr(module, "config", None)
    if config is None:
        raise CheckpointError(
            f"{type(module).__name__} holds computed buffers but no configuration to recompute them from"
        )
    rebuilt: nn.Module = type(module)(config).eval()
    return rebuilt


def as_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every meta parameter with a fake CPU tensor of `mode`, keeping ties (one object stays one object)."""
    memo: dict[int, nn.Parameter] = {}
    with mode:
        for module in model.modules():
            for name, p in list(module._parameters.items()):
                if p is None:
                    continue
                if id(p) not in memo:
                    memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cpu"), requires_grad=False)
                module._parameters[name] = memo[id(p)]


def load_real_model(checkpoint: Checkpoint) -> nn.Module:
    """The checkpoint's model with its weights, float32, eval, with transformers' attention; raises CheckpointError."""
    model = build_skeleton(checkpoint.config, "sdpa")
    names = set(checkpoint.tensor_names())
    for name in model.state_dict():
        tensor = torch.from_numpy(np.array(checkpoint.tensor(stored_name(name, names))))
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        expected = tuple(module._parameters[leaf].shape) if module._parameters.get(leaf) is not None else None
        if expected != tuple(tensor.shape):
            raise CheckpointError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the configuration says {expected}")
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    model.tie_weights()
    return model
