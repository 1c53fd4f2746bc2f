"""Granite 4: Mamba 2's layers, some attend, with or without positions; experts beside a shared MLP."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.experts import Experts, expert_layer
from llmc.compiler.architectures.shared.hybrid import (
    ATTENTION,
    CountedSize,
    Mamba,
    attention_weights,
    hybrid_cache,
    mamba_layer,
)
from llmc.compiler.architectures.shared.names import Names
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.tiny import TINY
from llmc.runtime.cache_shape import CacheShape, key_value


def _types(config: Config) -> list[bool]:
    """Which layers attend."""
    named = config.get("layer_types") or config.get("layers_block_type")
    return [kind in ATTENTION for kind in named or ["mamba"] * config["num_hidden_layers"]]


def _layer(config: Config, index: int) -> list[str]:
    if _types(config)[index]:
        ends = ("weight", "bias") if config.get("attention_bias") else ("weight",)
        parts = [f"self_attn.{name}_proj.{end}" for name in "qkvo" for end in ends]
    else:
        convolution, projections = config.get("mamba_conv_bias", True), config.get("mamba_proj_bias", False)
        parts = mamba_layer("mamba", convolution=bool(convolution), projections=bool(projections))
    parts += ["shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    return expert_layer(parts, ("router.weight",), "block_sparse_moe") if config.get("num_local_experts") else parts


def _cache(config: Config) -> CacheShape:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return hybrid_cache([
        key_value(i, config.get("num_key_value_heads") or heads, width) if attends else Mamba.of(config).cache(i)
        for i, attends in enumerate(_types(config))
    ])  # fmt: skip


def _size(config: Config, source: str) -> CountedSize:
    types, hidden, experts = _types(config), config["hidden_size"], config.get("num_local_experts") or 0
    shared = config.get("shared_intermediate_size") or 1024
    inner = sum(attention_weights(config) if attends else Mamba.of(config).weights for attends in types)
    inner += len(types) * hidden * (3 * shared + experts)
    each = len(types) * 3 * hidden * config["intermediate_size"]
    return CountedSize.counted(
        config, source, inner=inner, expert_weights=experts * each,
        chosen_weights=min(experts, config.get("num_experts_per_tok") or 0) * each,
    )  # fmt: skip


FAMILY = Family(
    model_class="GraniteMoeHybridForCausalLM",
    layer_at=_layer,
    reads=frozenset({
        "num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "embedding_multiplier",
        "attention_multiplier", "residual_multiplier", "logits_scaling", "attention_bias", "position_embedding_type",
        "layer_types", "layers_block_type", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state",
        "mamba_d_conv", "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",
    }),
    allows={"normalization_function": ("rmsnorm",), "init_method": ("mup",)},
    harmless=frozenset({"router_aux_loss_coef", "output_router_logits", "mamba_chunk_size"}),
    experts=Experts(("num_local_experts",), "linear"),
    sharding=rules(Names(), query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.o_proj"),
    size=_size,
    cache=_cache,
    fused={"linear": 7, "rms_norm": 0},
    tiny={
        **{k: v for k, v in TINY.items() if k != "head_dim"}, "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"], "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 48, "embedding_multiplier": 12.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.3, "logits_scaling": 6.0, "position_embedding_type": "rope", "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    },
)  # fmt: skip
