"""The transformers model as it is traced: llmc's attention and experts replace its own, and its weights are fake.

Only traced models are changed; references stay transformers' own. Based on transformers 5.23, the modeling file of each
model.

Latent attention: transformers' layers write keys into new memory (`expand_kv`), and DeepSeek V2's rotate neighbours by
complex numbers. Compilers support neither, and other operators with the same results replace them.

Models with their own attention code outside transformers' attention interface get the attention of a dialect
(attention.py). Where a method of a module computes attention from query, key and value, that method is replaced. Where
the forward computes it inline, the forward is replaced by one that projects and reshapes as the model does.

Experts in dialects:

`fused`     operators `llmc::expert_linear`, one per matrix, for compilers whose kernels read only chosen experts.
others      every expert on every token, without the results of experts that were not chosen: plain tensor operators
            with static shapes, none of which depends on tensor contents. Portable to any compiler.

Both follow transformers' contract of an experts function (transformers 5.23, integrations/moe.py): hidden states [T,
H], the ids of the chosen experts [T, k] and their weights [T, k] → [T, H].
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.architectures.shared.rope import BY_LENGTH
from llmc.compiler.frontend.attention import DIALECTS, attention_name
from llmc.compiler.frontend.skeleton import build_skeleton
from llmc.errors import CheckpointError

_ROTATE = "apply_rotary_emb"
"""Function that rotates with complex numbers; no other model's layers call it."""


def trace_latents(model: nn.Module) -> None:
    """Replace the attention of `model`'s layers with latents; other layers stay unchanged."""
    for module in model.modules():
        if not hasattr(module, "expand_kv"):
            continue
        module.expand_kv = partial(_expanded, module)
        forward: Any = type(module).forward
        if _ROTATE in forward.__code__.co_names:
            own = FunctionType(
                forward.__code__, {**forward.__globals__, _ROTATE: _rotated}, forward.__name__, forward.__defaults__,
                forward.__closure__,
            )  # fmt: skip
            module.forward = partial(own, module)
            rotary: Any = model.get_submodule("model.rotary_emb")
            rotary.forward = partial(_angles, rotary)


def _expanded(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, H, Q, D] and values from latents [B, 1, Q, L] and the rotated part of keys [B, 1, Q, R]."""
    batch, _, length, _ = latents.shape
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    built = module.kv_b_proj(latents).view(batch, length, -1, sum(widths)).transpose(1, 2)
    keys, values = torch.split(built, widths, dim=-1)
    return torch.cat((keys, rotated.expand(-1, keys.shape[1], -1, -1)), dim=-1), values


def _angles(module: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Cosines, then sines, [B, Q, R]: the parts of the model's complex numbers."""
    angles = position_ids[..., None].float() * module.inv_freq.to(dtype=torch.float)
    return torch.cat((angles.cos(), angles.sin()), -1) * module.attention_scaling


def _rotated(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours (2i, 2i + 1) of [B, H, Q, R] as complex numbers, times those of `_angles`."""
    cos, sin = angles[:, None].chunk(2, -1)

    def turned(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(3)

    return turned(query), turned(key)


@torch.library.custom_op("llmc::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> Tensor:
    """Multiply each token with the matrices of its chosen experts: [T, k, N].

    x is [T, K], shared by all experts of a token, or [T, k, K]; weight [E, N, K], or [E, K, N] where `transposed`; bias
    [E, N]; experts [T, k] int64. This function is the operator's reference definition.
    """
    tokens, chosen = experts.shape
    rows = x[:, None].expand(tokens, chosen, x.shape[-1]) if x.dim() == 2 else x
    out = x.new_zeros(tokens, chosen, weight.shape[2 if transposed else 1])
    for expert in experts.unique().tolist():
        matrix = weight[expert] if transposed else weight[expert].T
        here = experts == expert
        out[here] = rows[here] @ matrix if bias is None else rows[here] @ matrix + bias[expert]
    return out


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(*experts.shape, weight.shape[2 if transposed else 1])


def _gated(module: Any, rows: Tensor) -> Tensor:
    gated: Tensor = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    return gated


def _normed(module: Any, rows: Tensor) -> Tensor:
    normed: Tensor = module.post_expert_norm(rows) if module.has_post_expert_norm else rows
    return normed


def _matrices(module: Any) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Weight and bias of the input matrix, and of the output matrix."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    into, out = (
        (getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None)
        for name in (first, "down_proj")
    )
    return into, out


def _chosen_only(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    into, out = _matrices(module)
    rows = torch.ops.llmc.expert_linear(hidden_states, *into, top_k_index, module.is_transposed)
    rows = torch.ops.llmc.expert_linear(_gated(module, rows), *out, top_k_index, module.is_transposed)
    return (_normed(module, rows) * top_k_weights[:, :, None]).sum(1).to(hidden_states.dtype)


def _every_expert(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    def matmuls(rows: Tensor, matrix: tuple[Tensor, Tensor | None]) -> Tensor:
        weight, bias = matrix
        out = torch.matmul(rows, weight if module.is_transposed else weight.transpose(1, 2))
        return out if bias is None else out + bias[:, None]

    into, out = _matrices(module)
    chosen = top_k_index[:, :, None] == torch.arange(into[0].shape[0])
    shares = torch.where(chosen, top_k_weights[:, :, None], 0.0).sum(1).transpose(0, 1)[:, :, None]
    rows = _normed(module, matmuls(_gated(module, matmuls(hidden_states[None], into)), out))
    # an expert may overflow on tokens that it does not serve: replaced, not scaled, because 0 × infinity is NaN
    return (torch.where(shares != 0, rows, 0.0) * shares).sum(0).to(hidden_states.dtype)


def registered(name: str) -> bool:
    """Whether transformers has an experts function registered under this name."""
    return name in ALL_EXPERTS_FUNCTIONS


ALL_EXPERTS_FUNCTIONS.register(attention_name("fused"), _chosen_only)
ALL_EXPERTS_FUNCTIONS.register(attention_name("read_only"), _every_expert)
ALL_EXPERTS_FUNCTIONS.register(attention_name("two_part"), _every_expert)


Attention = Callable[..., tuple[Tensor, None]]
"""(module, query, key, value, mask) → [B, Q, Hq, D]."""


def take_over(model: PreTrainedModel, name: str) -> None:
    """Make the layers of `model`, which is outside the interface, use the attention function registered as `name`.
    Raises CheckpointError for a model without any of the supported modules."""
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
    """The dialect's mask, or an unused tensor where the dialect needs none, because some models convert their mask."""
    built = ALL_MASK_ATTENTION_FUNCTIONS[name]

    def mask(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor | None = built(*args, **kwargs)
        return torch.zeros(1, 1, 1, 1) if found is None else found

    return mask


for _name in map(attention_name, DIALECTS):
    ALL_MASK_ATTENTION_FUNCTIONS.register(_masked_as(_name), _some_mask(_name))


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, module.weight, module.bias)


def _by_method(module: nn.Module, attend: Attention) -> None:
    """`_attn(query, key, value, mask)` → [B, H, Q, D], with scores over the root of the head's width."""

    def attn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_: Any) -> tuple[Tensor, None]:
        return attend(module, query, key, value, mask)[0].transpose(1, 2), None

    module._attn = attn


def _by_group(module: Any, hidden: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, Hq, Q, D], key and value of a projection that holds, for each of `groups` key heads in turn, its
    queries, key and value."""
    batch, length, _ = hidden.shape
    heads, dim = module.num_heads, module.head_dim
    packed = module.query_key_value(hidden).view(batch, length, groups, heads // groups + 2, dim)
    query = packed[:, :, :, :-2].reshape(batch, length, heads, dim).transpose(1, 2)
    return query, packed[:, :, :, -2].transpose(1, 2), packed[:, :, :, -1].transpose(1, 2)


def _falcon(model: Any, attend: Attention) -> None:
    """The layers of a FalconModel. Where it uses ALiBi, it rounds what it adds to scores to bfloat16. A buffer holds
    these values as a table, which traced programs look up as they do learned positions."""
    source: Any = sys.modules[type(model).__module__]
    by_offset, model.use_alibi = model.use_alibi, False
    if by_offset:
        config = model.config
        positions, heads = config.max_position_embeddings, config.num_attention_heads
        built = source.build_alibi_tensor(torch.ones(1, positions, dtype=torch.long), heads, torch.float32)
        model.register_buffer("by_offset", built[:, 0] / math.sqrt(config.hidden_size // heads), persistent=False)

    def forward(
        module: Any, hidden: Tensor, attention_mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        query, key, value = _by_group(module, hidden, module.num_kv_heads)
        if not by_offset:
            query, key = source.apply_rotary_pos_emb(query, key, *position_embeddings)
        added = {"by_offset": model.by_offset} if by_offset else {}
        return module.dense(attend(module, query, key, value, attention_mask, **added)[0].flatten(2)), None

    for layer in model.h:
        layer.self_attention.forward = partial(forward, layer.self_attention)


def _bloom(module: Any, attend: Attention) -> None:
    built = sys.modules[type(module).__module__]._get_alibi_slopes(module.num_heads, torch.device("cpu"))
    slopes: list[float] = built.tolist()

    def forward(hidden: Tensor, residual: Tensor, attention_mask: Tensor | None, **_: Any) -> tuple[Tensor, None]:
        parts = _by_group(module, hidden, module.num_heads)
        out = attend(module, *parts, attention_mask, slopes=slopes)[0].flatten(2)
        return module.dense(out) + residual, None

    module.forward = forward


def _mpt(module: Any, attend: Attention) -> None:
    """Its mask is True where a key is hidden; its ALiBi table ends at 0 for the last key."""
    built = sys.modules[type(module).__module__].build_mpt_alibi_tensor(module.n_heads, 2, device=torch.device("cpu"))
    slopes: list[float] = (-built[:, 0, 0]).tolist()

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
"""Replacements by the class of a layer's attention, or of the module with the layers."""
_LINEAR = frozenset({"FalconLinear"})


def build_traceable(config: Mapping[str, Any], attention: str) -> nn.Module:
    """Build the skeleton with the attention function registered as `attention`, and the experts function of that name,
    if there is one. Rotary frequencies do not change with a sequence's length. Raises CheckpointError."""
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
    """Keep rotary frequencies those of sequences within the original length (shared/rope.py), for any length."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds in BY_LENGTH:
            module.rope_type = "default"
        elif isinstance(kinds, dict):
            kinds.update({layers: "default" for layers, kind in kinds.items() if kind in BY_LENGTH})


def _without_gradient_marks(model: nn.Module) -> None:
    """Remove `torch.no_grad` from methods that it covers completely. Nothing is traced with gradients, and for each of
    them torch.export creates a nested program, which it walks several times."""
    for module in model.modules():
        forward = type(module).forward
        built_by = getattr(forward, "__wrapped__", None) and getclosurevars(forward).nonlocals.get("ctx_factory")
        if isinstance(getattr(built_by, "__self__", None), torch.no_grad):
            module.forward = MethodType(forward.__wrapped__, module)


def as_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every meta parameter by a fake CPU tensor of `mode`, keeping ties (one object stays one object)."""
    memo: dict[int, nn.Parameter] = {}
    with mode:
        for module in model.modules():
            for name, p in list(module._parameters.items()):
                if p is None:
                    continue
                if id(p) not in memo:
                    memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cpu"), requires_grad=False)
                module._parameters[name] = memo[id(p)]
