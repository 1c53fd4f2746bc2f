"""Jamba: Mamba's first layers, between which some attend without positions; experts in every other MLP's place."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.experts import Experts
from llmc.compiler.architectures.shared.gpt import NO_ROPE
from llmc.compiler.architectures.shared.hybrid import CountedSize, attention_weights, hybrid_cache
from llmc.compiler.architectures.shared.names import Names
from llmc.compiler.architectures.shared.selective import Selective, selective_layer
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.tiny import TINY
from llmc.runtime.cache_shape import CacheShape, key_value

NAMES = Names(others=lambda config: ["model.final_layernorm.weight"])


def _attends(config: Config, index: int) -> bool:
    return bool(index % config.get("attn_layer_period", 8) == config.get("attn_layer_offset", 4))


def _experts(config: Config, index: int) -> int:
    """Of a layer; 0 where it has an MLP, also where there would be one expert."""
    count = int(config.get("num_experts", 16))
    every, first = config.get("expert_layer_period", 2), config.get("expert_layer_offset", 1)
    return count if count > 1 and index % every == first else 0


def _mamba(config: Config) -> Selective:
    return Selective.of(
        config["hidden_size"], config.get("mamba_expand", 2), config.get("mamba_d_state", 16),
        config.get("mamba_dt_rank"), config.get("mamba_d_conv", 4),
    )  # fmt: skip


def _layer(config: Config, index: int) -> list[str]:
    if _attends(config, index):
        parts = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    else:
        convolution, projections = config.get("mamba_conv_bias", True), config.get("mamba_proj_bias", False)
        parts = selective_layer("mamba", convolution=bool(convolution), projections=bool(projections))
        parts += [f"mamba.{name}_layernorm.weight" for name in ("dt", "b", "c")]
    if _experts(config, index):
        mlp = ["router.weight", "experts.gate_up_proj", "experts.down_proj"]
    else:
        mlp = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
    return [*parts, *(f"feed_forward.{name}" for name in mlp), "input_layernorm.weight", "pre_ff_layernorm.weight"]


def _cache(config: Config) -> CacheShape:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return hybrid_cache([
        key_value(i, config.get("num_key_value_heads") or heads, width) if _attends(config, i)
        else _mamba(config).cache(i)
        for i in range(config["num_hidden_layers"])
    ])  # fmt: skip


def _size(config: Config, source: str) -> CountedSize:
    layers = range(int(config["num_hidden_layers"]))
    mlp = 3 * config["hidden_size"] * config["intermediate_size"]
    experts = [_experts(config, i) for i in layers]
    attending = sum(_attends(config, i) for i in layers)
    inner = attending * attention_weights(config) + (len(layers) - attending) * _mamba(config).weights
    inner += sum(count * config["hidden_size"] if count else mlp for count in experts)
    chosen = sum(min(count, config.get("num_experts_per_tok", 2)) for count in experts)
    return CountedSize.counted(
        config, source, inner=inner, expert_weights=sum(experts) * mlp, chosen_weights=chosen * mlp
    )


FAMILY = Family(
    model_class="JambaForCausalLM",
    layer_at=_layer,
    names=NAMES,
    unread=NO_ROPE | {"max_position_embeddings"},
    reads=frozenset({
        "attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset", "num_experts",
        "num_experts_per_tok", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "mamba_conv_bias",
        "mamba_proj_bias",
    }),
    allows={"mamba_inner_layernorms": (True,), "sliding_window": (None,)},
    harmless=frozenset({
        "max_position_embeddings", "num_logits_to_keep", "output_router_logits", "router_aux_loss_coef",
        "use_mamba_kernels", "use_mambapy", "use_associative_scan", "calc_logits_for_entire_prompt", "n_ctx",
    }),
    experts=Experts(("num_experts",)),
    sharding=rules(NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.o_proj"),
    size=_size,
    cache=_cache,
    fused={"linear": 6, "rms_norm": 0},
    tiny={
        **{k: v for k, v in TINY.items() if k not in ("head_dim", "max_position_embeddings")}, "num_hidden_layers": 2,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0,
        "num_experts": 8, "num_experts_per_tok": 2, "mamba_d_state": 8,
    },
)  # fmt: skip
