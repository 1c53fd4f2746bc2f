"""Models that compute attention in code of their own, outside transformers' attention interface.

Their layers are given the attention of a dialect (attention.py): a module that computes attention from query, key and
value in a method of its own has that method replaced; one that does so inline has its forward replaced, which projects
and reshapes as the model does. Read from transformers 5.23, the modeling file of each model.

Only models that are traced are changed (skeleton.py), so that references stay transformers' own.
"""

from __future__ import annotations

import math
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


def _by_group(module: Any, hidden: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, Hq, Q, D], key and value of a projection that holds, for each of `groups` heads of keys in turn, its
    queries, its key and its value."""
    batch, length, _ = hidden.shape
    heads, dim = module.num_heads, module.head_dim
    packed = module.query_key_value(hidden).view(batch, length, groups, heads // groups + 2, dim)
    query = packed[:, :, :, :-2].reshape(batch, length, heads, dim).transpose(1, 2)
    return query, packed[:, :, :, -2].transpose(1, 2), packed[:, :, :, -1].transpose(1, 2)


def _falcon(model: Any, attend: Attention) -> None:
    """The layers of a FalconModel. Where it adds to scores by positions (ALiBi), it rounds what it adds to bfloat16:
    a table has that, as a buffer, which traced programs look up as they do learned positions."""
    source: Any = sys.modules[type(model).__module__]
    by_place, model.use_alibi = model.use_alibi, False
    if by_place:
        config = model.config
        positions, heads = config.max_position_embeddings, config.num_attention_heads
        made = source.build_alibi_tensor(torch.ones(1, positions, dtype=torch.long), heads, torch.float32)
        model.register_buffer("by_place", made[:, 0] / math.sqrt(config.hidden_size // heads), persistent=False)

    def forward(
        module: Any, hidden: Tensor, attention_mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        query, key, value = _by_group(module, hidden, module.num_kv_heads)
        if not by_place:
            query, key = source.apply_rotary_pos_emb(query, key, *position_embeddings)
        added = {"by_place": model.by_place} if by_place else {}
        return module.dense(attend(module, query, key, value, attention_mask, **added)[0].flatten(2)), None

    for layer in model.h:
        layer.self_attention.forward = partial(forward, layer.self_attention)


def _bloom(module: Any, attend: Attention) -> None:
    made = sys.modules[type(module).__module__]._get_alibi_slopes(module.num_heads, torch.device("cpu"))
    slopes: list[float] = made.tolist()

    def forward(hidden: Tensor, residual: Tensor, attention_mask: Tensor | None, **_: Any) -> tuple[Tensor, None]:
        parts = _by_group(module, hidden, module.num_heads)
        out = attend(module, *parts, attention_mask, slopes=slopes)[0].flatten(2)
        return module.dense(out) + residual, None

    module.forward = forward


def _mpt(module: Any, attend: Attention) -> None:
    """Its mask says True of what is not seen; its table of ALiBi ends at 0 for the last key."""
    made = sys.modules[type(module).__module__].build_mpt_alibi_tensor(module.n_heads, 2, device=torch.device("cpu"))
    slopes: list[float] = (-made[:, 0, 0]).tolist()

    def forward(hidden_states: Tensor, attention_mask: Tensor, **_: Any) -> tuple[Tensor, None]:
        packed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            packed = packed.clamp(-module.clip_qkv, module.clip_qkv)
        batch, length, _width = packed.shape
        parts = [
            part.reshape(batch, length, module.n_heads, module.head_dim).transpose(1, 2) for part in packed.chunk(3, 2)
        ]
        mask = torch.where(attention_mask, torch.finfo(packed.dtype).min, 0.0).to(packed.dtype)
        out, _none = attend(module, *parts, mask, scaling=module.softmax_scale, slopes=slopes)
        return module.out_proj(out.flatten(2)), None

    module.forward = forward


_ATTENTIONS: dict[str, Callable[[Any, Attention], None]] = {
    "GPTJAttention": _by_method,
    "CodeGenAttention": _by_method,
    "FalconModel": _falcon,
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
}
"""By the class of a layer's attention, or of what has the layers."""
_LINEAR = frozenset({"FalconLinear"})
