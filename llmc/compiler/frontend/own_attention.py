"""Models that compute attention in code of their own, outside transformers' attention interface.

Their layers are given the attention of a dialect (attention.py): a module that computes attention from query, key and
value in a method of its own has that method replaced; one that does so inline has its forward replaced, which projects
and reshapes as the model does. Read from transformers 5.23, the modeling file of each model.

Only models that are traced are changed (skeleton.py), so that references stay transformers' own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmc.compiler.frontend.attention import DIALECTS, attention_name
from llmc.errors import CheckpointError

Attention = Callable[..., tuple[Tensor, None]]
"""(module, query, key, value, mask) → [B, Q, Hq, D]."""


def take_over(model: PreTrainedModel, name: str) -> None:
    """Let the layers of `model`, which is outside the interface, attend by the function that is registered as `name`.

    Raises CheckpointError for a model with none of the modules that are known here.
    """
    attend: Attention = ALL_ATTENTION_FUNCTIONS[name]
    found = [module for module in model.modules() if type(module).__name__ in _ATTENTIONS]
    if not found:
        raise CheckpointError(
            f"{type(model).__name__} computes attention outside transformers' interface, in code that llmc does not "
            "know: the model is not supported"
        )
    for module in found:
        _ATTENTIONS[type(module).__name__](module, attend)
    for module in model.modules():
        if type(module).__name__ in _LINEAR:
            module.forward = partial(_linear, module)
    model.config._attn_implementation_internal = _masked_as(name)


def _masked_as(name: str) -> str:
    return f"{name}_own"


def _some_mask(name: str) -> Callable[..., Tensor]:
    """The dialect's mask; a tensor that nothing reads where it needs none, since some models convert what they get."""
    made = ALL_MASK_ATTENTION_FUNCTIONS[name]

    def mask(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor | None = made(*args, **kwargs)
        return torch.zeros(1, 1, 1, 1) if found is None else found

    return mask


for _name in map(attention_name, DIALECTS):
    ALL_MASK_ATTENTION_FUNCTIONS.register(_masked_as(_name), _some_mask(_name))


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    """A product that the model writes as `x @ weight.T`."""
    return functional.linear(x, module.weight, module.bias)


def _by_method(module: nn.Module, attend: Attention) -> None:
    """`_attn(query, key, value, mask)` → [B, H, Q, D], with scores over the root of the head's width."""

    def attn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_: Any) -> tuple[Tensor, None]:
        return attend(module, query, key, value, mask)[0].transpose(1, 2), None

    module._attn = attn


def _of_groups(module: nn.Module, attend: Attention) -> None:
    """Falcon: the projection holds, for each key/value head in turn, its queries, its key and its value."""
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb

    def forward(
        hidden: Tensor, attention_mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        batch, length, _width = hidden.shape
        heads, groups, dim = module.num_heads, module.num_kv_heads, module.head_dim
        packed = module.query_key_value(hidden).view(batch, length, groups, heads // groups + 2, dim)
        query = packed[:, :, :, :-2].reshape(batch, length, heads, dim).transpose(1, 2)
        key, value = packed[:, :, :, -2].transpose(1, 2), packed[:, :, :, -1].transpose(1, 2)
        query, key = rotate(query, key, *position_embeddings)
        out, _none = attend(module, query, key, value, attention_mask)
        return module.dense(out.reshape(batch, length, heads * dim)), None

    module.forward = forward


_ATTENTIONS: dict[str, Callable[[Any, Attention], None]] = {
    "GPTJAttention": _by_method,
    "CodeGenAttention": _by_method,
    "FalconAttention": _of_groups,
}
"""By the class of a layer's attention."""
_LINEAR = frozenset({"FalconLinear"})
