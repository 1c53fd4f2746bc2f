"""The transformers model as it is traced: llmc's attention and experts in place of its own, its weights fake."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getclosurevars
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.architectures.shared.rope import BY_LENGTH
from llmc.compiler.frontend.experts import registered
from llmc.compiler.frontend.latent import trace_latents
from llmc.compiler.frontend.own_attention import take_over
from llmc.compiler.frontend.skeleton import build_skeleton


def build_traceable(config: Mapping[str, Any], attention: str) -> nn.Module:
    """The skeleton with the attention function registered as `attention`.

    Experts are computed by the function registered under the same name, if there is one (frontend/experts.py). Rotary
    frequencies do not change with a sequence's length. Raises CheckpointError.
    """
    model = build_skeleton(config)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(attention)
    elif cache_of(config).kv:
        take_over(model, attention)
    _keep_frequencies(model)
    _without_gradient_marks(model)
    trace_latents(model)
    if registered(attention):
        model.set_experts_implementation(attention)
    return model


def _keep_frequencies(model: nn.Module) -> None:
    """Let rotary frequencies be those of sequences within the original length (shared/rope.py), however long one is."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds in BY_LENGTH:
            module.rope_type = "default"
        elif isinstance(kinds, dict):
            kinds.update({layers: "default" for layers, kind in kinds.items() if kind in BY_LENGTH})


def _without_gradient_marks(model: nn.Module) -> None:
    """Take `torch.no_grad` off what modules compute, where it is all of a module: nothing is traced with gradients, and
    for each torch.export makes a program within the program, of which it walks all more than once."""
    for module in model.modules():
        forward = type(module).forward
        made_by = getattr(forward, "__wrapped__", None) and getclosurevars(forward).nonlocals.get("ctx_factory")
        if isinstance(getattr(made_by, "__self__", None), torch.no_grad):
            module.forward = MethodType(forward.__wrapped__, module)


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
