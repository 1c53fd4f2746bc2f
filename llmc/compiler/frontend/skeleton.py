"""The unmodified transformers model, built from its configuration alone: weights have shapes but no values.

Linear modules with selectable LoRA adapters (checkpoint/adapter_layout.py) replace those that adapters change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from llmc.compiler.architectures import require_supported
from llmc.compiler.architectures.shared.names import LM_HEADS
from llmc.compiler.checkpoint.adapter_layout import SELECTABLE, AdapterLayout
from llmc.errors import CheckpointError

MASKS: ContextVar[list[Tensor]] = ContextVar("masks")
"""The mask of each token for each group, [B, Q, R]."""


class AdaptedLinear(nn.Linear):
    """`linear` plus the LoRA matmuls of group `group`, which has R `columns`."""

    def __init__(self, linear: nn.Linear, group: int, columns: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.group = group
        self.lora_A = nn.Linear(linear.in_features, columns, bias=False, device="meta")
        self.lora_B = nn.Linear(columns, linear.out_features, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A(x)
        mask = MASKS.get()[self.group].reshape(low.shape).to(low.dtype)
        product: Tensor = functional.linear(x, self.weight, self.bias) + self.lora_B(low * mask)
        return product


class AdapterMasks(nn.Module):
    """Masks of a step's tokens, one for each group."""

    def __init__(self, layout: AdapterLayout) -> None:
        super().__init__()
        self._names: list[str] = []
        known: dict[tuple[int, ...], str] = {}
        for group in layout.groups:
            if group.ranks not in known:
                known[group.ranks] = f"masks_{len(known)}"
                self.register_buffer(known[group.ranks], torch.from_numpy(group.masks()), persistent=False)
            self._names.append(known[group.ranks])

    def forward(self, adapters: Tensor) -> list[Tensor]:
        """`adapters` [B, Q] int64, 0 for none → one mask [B, Q, R] per group."""
        built = {name: self.get_buffer(name)[adapters] for name in dict.fromkeys(self._names)}
        return [built[name] for name in self._names]


def adapt(model: nn.Module, layout: AdapterLayout) -> None:
    """Replace the modules that adapters change, and add `adapter_masks`. Raises CheckpointError for an adapter of
    anything but a linear module of a layer."""
    groups = list(layout.groups)
    for name, module in list(model.named_modules()):
        group = layout.group(name)
        if group is None:
            continue
        if type(module) is not nn.Linear or f"{name}.weight" in LM_HEADS:
            raise CheckpointError(
                f"{name} is a {type(module).__name__}, and selectable adapters can change only linear modules of "
                "layers: merge the adapters that change it (--lora)"
            )
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, AdaptedLinear(module, groups.index(group), group.columns))
    model.adapter_masks = AdapterMasks(layout)


_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that transformers raises for values it cannot compute with."""


_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_autoset")
"""Keys that choose an attention package, which transformers would import. Every package computes the same."""


def model_config(config: Mapping[str, Any]) -> PretrainedConfig:
    """Create the transformers configuration object of an HF-style `config` dict. Raises CheckpointError."""
    model_type = require_supported(config)
    fields = {
        k: v
        for k, v in _floats(config).items()
        if k not in ("model_type", "transformers_version", "dtype", "torch_dtype", SELECTABLE, *_ATTENTION)
    }
    transformers_logging.set_verbosity_error()
    try:
        return AutoConfig.for_model(model_type, **fields)
    except (*_REFUSALS, StrictDataclassError) as e:
        raise CheckpointError(f"the model configuration is not a valid {model_type} configuration: {e}") from e


def _floats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Infinity as a number, where transformers wrote it in its own form: {"__float__": "Infinity"}."""
    decoded: dict[str, Any] = PretrainedConfig._decode_special_floats(dict(config))
    return decoded


def build_skeleton(config: Mapping[str, Any]) -> PreTrainedModel:
    """Build a `…ForCausalLM` in eval mode whose parameters are on the meta device and whose buffers are real.

    It uses the attention that transformers chooses, which supports all that the model needs (soft caps, sinks). Buffers
    that checkpoints hold are parameters here; the others (rotary frequencies) are computed from the configuration.
    Dropout is left out. Raises CheckpointError.
    """
    hf_config = model_config(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        for module in list(model.modules()):
            _hold_stored_buffers(module)
            _compute_buffers(module, model)
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Dropout):
                    setattr(module, name, nn.Identity())
    except _REFUSALS as e:
        nulls = ", ".join(name for name, value in config.items() if value is None)
        raise CheckpointError(
            f"transformers cannot build the {config.get('model_type')} model of this configuration: {e}"
            + (f"; null in it, for which it has no default: {nulls}" if nulls else "")
        ) from e
    layout = AdapterLayout.of(config)
    if layout is not None:
        adapt(model, layout)
    model.eval().requires_grad_(False)
    return model


def cache_argument(model: nn.Module) -> str:
    """Name of a model's cache argument and output; pure Mamba models use a different one."""
    return "cache_params" if "cache_params" in signature(model.forward).parameters else "past_key_values"


def _hold_stored_buffers(module: nn.Module) -> None:
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and name not in module._non_persistent_buffers_set:
            del module._buffers[name]
            module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def _compute_buffers(module: nn.Module, model: PreTrainedModel) -> None:
    """Compute buffers by the model's own rule, as transformers does after loading a checkpoint (5.23,
    modeling_utils.py, `_move_missing_keys_from_meta_to_device`). The rule runs over zeros and over ones; values that it
    leaves unchanged are not computed."""
    names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
    for owner in (module, model.base_model):  # some models write their layers' buffers
        if names:
            names = _left_by_rule(module, names, partial(model._init_weights, owner))
    if names:
        raise CheckpointError(
            f"{type(module).__name__} holds a buffer {names[0]!r} that no checkpoint has and no rule of transformers "
            "computes: the model is not supported"
        )


def _left_by_rule(module: nn.Module, names: list[str], rule: Callable[[], Any]) -> list[str]:
    written: list[Tensor] = []
    for filler in (0, 1):
        for name in names:
            module._buffers[name] = torch.full_like(module._buffers[name], filler, device="cpu")
        rule()
        written += [module._buffers[name] for name in names]
    pairs = zip(names, written, written[len(names) :], strict=False)
    return [name for name, first, second in pairs if not torch.equal(first, second)]
